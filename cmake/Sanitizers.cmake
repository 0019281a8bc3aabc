# SPECTRUMKV_SANITIZE, SPECTRUMKV_FUZZERS -> flags of everything, and what tests find in their environment:
#   SPECTRUMKV_TEST_ENVIRONMENT        tests that run our own code alone
#   SPECTRUMKV_GRPC_TEST_ENVIRONMENT   tests that run gRPC too, or start daemons that do
# ThreadSanitizer sees only code it has instrumented. The system's gRPC is not, so it would report every word that gRPC
# guards by its own locks; those tests ignore what such libraries do, and what runs in their callbacks (tsan_grpc.supp).
# Tests without gRPC ignore nothing but what tests/sanitizers/tsan.supp names, each with its reason.
#   SPECTRUMKV_SANITIZED_SLOWDOWN      what their time limits are multiplied with
set(SPECTRUMKV_SANITIZED_SLOWDOWN 1)
set(SPECTRUMKV_TEST_ENVIRONMENT "")
set(SPECTRUMKV_GRPC_TEST_ENVIRONMENT "")
if(SPECTRUMKV_SANITIZE)
  set(SPECTRUMKV_SANITIZED_SLOWDOWN 5)
  add_compile_options(-fsanitize=${SPECTRUMKV_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${SPECTRUMKV_SANITIZE})
  list(APPEND SPECTRUMKV_GRPC_TEST_ENVIRONMENT "SPECTRUMKV_SANITIZED=1") # for tests that bound a daemon's memory
  # gcc 12 says of std::regex and others under sanitizers that they read what they have not set.
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    add_compile_options(-Wno-maybe-uninitialized)
  endif()
endif()
if(SPECTRUMKV_SANITIZE MATCHES "undefined")
  set(ubsan "UBSAN_OPTIONS=print_stacktrace=1")
  list(APPEND SPECTRUMKV_TEST_ENVIRONMENT ${ubsan})
  list(APPEND SPECTRUMKV_GRPC_TEST_ENVIRONMENT ${ubsan})
endif()
if(SPECTRUMKV_SANITIZE MATCHES "thread")
  set(tsan "TSAN_OPTIONS=second_deadlock_stack=1:history_size=4")
  set(suppressions ${PROJECT_SOURCE_DIR}/tests/sanitizers)
  list(APPEND SPECTRUMKV_TEST_ENVIRONMENT "${tsan}:suppressions=${suppressions}/tsan.supp")
  list(APPEND SPECTRUMKV_GRPC_TEST_ENVIRONMENT
    "${tsan}:suppressions=${suppressions}/tsan_grpc.supp:ignore_noninstrumented_modules=1")
endif()
if(SPECTRUMKV_FUZZERS)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "SPECTRUMKV_FUZZERS=ON needs clang (libFuzzer is a part of it); the compiler is "
      "${CMAKE_CXX_COMPILER_ID} (${CMAKE_CXX_COMPILER}). Use `cmake --preset fuzz`")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link) # coverage of all our code; fuzz targets add the engine
endif()
