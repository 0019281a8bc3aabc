# Target check_alone: compiles every header and every source of server/ and client/ alone, to prove that each includes
# what it needs; builds that compile several files at once do not notice.
function(spectrumkv_check_alone)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}
    ${PROJECT_SOURCE_DIR}/kernels/*.h ${PROJECT_SOURCE_DIR}/server/*.h ${PROJECT_SOURCE_DIR}/client/*.h)
  # Bodies of the ISA files, not headers of their own: they need those files' flags.
  list(FILTER headers EXCLUDE REGEX "^kernels/cpu/simd_")
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/server/*.cc ${PROJECT_SOURCE_DIR}/client/*.cc)
  foreach(header ${headers})
    set(source ${PROJECT_BINARY_DIR}/check_alone/${header}.cc)
    file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${header}\"\n#include \"${header}\"\n" @ONLY)
    list(APPEND sources ${source})
  endforeach()
  add_library(check_alone OBJECT EXCLUDE_FROM_ALL ${sources})
  target_compile_options(check_alone PRIVATE -O0 -g0)
  target_include_directories(check_alone PRIVATE ${PROJECT_SOURCE_DIR}/client/sdk) # as they include one another
  target_link_libraries(check_alone PRIVATE spectrumkv_flags spectrumkv_proto spectrumkv_version gRPC::grpc++ absl::status
    absl::statusor yaml-cpp prometheus-cpp::core Threads::Threads)
endfunction()
