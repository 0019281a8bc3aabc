# Target check_headers: compiles every header alone, to prove that each includes what it needs.
function(spectrumkv_check_headers)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}
    ${PROJECT_SOURCE_DIR}/kernels/*.h ${PROJECT_SOURCE_DIR}/server/*.h ${PROJECT_SOURCE_DIR}/client/*.h)
  # Bodies of the ISA files, not headers of their own: they need those files' flags.
  list(FILTER headers EXCLUDE REGEX "^kernels/cpu/simd_")
  set(sources)
  foreach(header ${headers})
    set(source ${PROJECT_BINARY_DIR}/check_headers/${header}.cc)
    file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${header}\"\n#include \"${header}\"\n" @ONLY)
    list(APPEND sources ${source})
  endforeach()
  add_library(check_headers OBJECT EXCLUDE_FROM_ALL ${sources})
  target_compile_options(check_headers PRIVATE -O0 -g0)
  target_include_directories(check_headers PRIVATE ${PROJECT_SOURCE_DIR}/client/sdk) # as they include one another
  target_link_libraries(check_headers PRIVATE spectrumkv_flags spectrumkv_proto gRPC::grpc++ absl::status absl::statusor
    Threads::Threads)
endfunction()
