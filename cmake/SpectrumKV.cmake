# Helpers every folder uses. One static library per folder, PRIVATE or PUBLIC links stated there.

# Flags of all our code. Floating point is never contracted or relaxed: backends must agree bit for bit.
# gcc 12 warns falsely of "text" + std::string at -O2 (GCC bug 105651) and of sorted vectors of bytes at -O3.
add_library(spectrumkv_flags INTERFACE)
target_compile_options(spectrumkv_flags INTERFACE
  -ffp-contract=off -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-unused-parameter -Wno-missing-field-initializers
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict;-Wno-stringop-overread>)
if(SPECTRUMKV_WERROR)
  target_compile_options(spectrumkv_flags INTERFACE -Werror)
endif()
target_include_directories(spectrumkv_flags INTERFACE ${PROJECT_SOURCE_DIR})
include(Sanitizers)
find_program(SPECTRUMKV_CCACHE ccache)
if(SPECTRUMKV_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${SPECTRUMKV_CCACHE})
endif()

# spectrumkv_library(name SOURCES ... [PUBLIC libs...] [PRIVATE libs...])
function(spectrumkv_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC ${ARG_PUBLIC} PRIVATE spectrumkv_flags ${ARG_PRIVATE})
endfunction()

# spectrumkv_test(name LABELS ... SOURCES ... LIBS ... [TIMEOUT seconds] [GRPC]): a GoogleTest program, one CTest entry.
# GRPC: it runs gRPC or daemons, of which ThreadSanitizer sees half (Sanitizers.cmake).
# What a test cannot check here it prints as a line "SKIPPED: reason"; scripts/test repeats these lines at its end. A
# program that could check nothing at all may exit with 77. (Never by its words: a failure beside them would be hidden.)
function(spectrumkv_test name)
  cmake_parse_arguments(ARG "GRPC" "TIMEOUT" "LABELS;SOURCES;LIBS;COMPILE_OPTIONS" ${ARGN})
  if(NOT SPECTRUMKV_TESTS)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE spectrumkv_flags ${ARG_LIBS} GTest::gtest_main GTest::gmock)
  # gcc 12 at -O3 warns falsely of initializer lists and byte vectors it has inlined into tests.
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${name} PRIVATE ${ARG_COMPILE_OPTIONS})
  endif()
  if(NOT "cuda" IN_LIST ARG_LABELS) # those run kernels that are compiled with them
    spectrumkv_compile_quickly(${name})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * ${SPECTRUMKV_SANITIZED_SLOWDOWN}")
  set(environment ${SPECTRUMKV_TEST_ENVIRONMENT})
  if(ARG_GRPC)
    set(environment ${SPECTRUMKV_GRPC_TEST_ENVIRONMENT})
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
    SKIP_RETURN_CODE 77 ENVIRONMENT "${environment}")
endfunction()
