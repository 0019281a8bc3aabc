# Test programs are compiled once and run for seconds: in builds that compile several files at once (UnityBuild.cmake)
# they are optimised little, share the precompiled headers of the libraries that all of them include, and are linked by
# gold where there is one: half of the time. What they test keeps its own flags, and builds without this (preset dev)
# prove that each file includes what it needs.
function(spectrumkv_compile_quickly name)
  if(SPECTRUMKV_QUICK_TESTS)
    target_compile_options(${name} PRIVATE ${SPECTRUMKV_QUICK_OPTIONS})
    target_link_options(${name} PRIVATE ${SPECTRUMKV_QUICK_LINK_OPTIONS})
    target_precompile_headers(${name} REUSE_FROM spectrumkv_test_headers)
  endif()
endfunction()

# spectrumkv_compile_together(name): the files of a program of many share one compilation.
function(spectrumkv_compile_together name)
  if(SPECTRUMKV_QUICK_TESTS)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON)
    # gcc 12 takes the constant list of Policy's default tiers for something that was never written.
    target_compile_options(${name} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  endif()
endfunction()

if(SPECTRUMKV_QUICK_TESTS AND SPECTRUMKV_TESTS)
  # -pthread: some libraries want it, and all must agree. -fpch-preprocess: what ccache needs to know the headers.
  # gcc 12's warnings of the flow of values are false at -O1 where strings are put together.
  set(SPECTRUMKV_QUICK_OPTIONS -O1 -pthread
    $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess;-Wno-array-bounds;-Wno-stringop-overflow;-Wno-maybe-uninitialized>)
  if(SPECTRUMKV_SANITIZE MATCHES "undefined")
    # The code under test is watched whole; that of the tests, twice as large with it, is not asked for overflows.
    list(APPEND SPECTRUMKV_QUICK_OPTIONS -O0 -fno-sanitize=undefined)
  endif()
  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=gold SPECTRUMKV_HAVE_GOLD)
  set(SPECTRUMKV_QUICK_LINK_OPTIONS $<$<BOOL:${SPECTRUMKV_HAVE_GOLD}>:-fuse-ld=gold>)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/test_headers.cc CONTENT "") # not touched where it is there
  add_library(spectrumkv_test_headers OBJECT ${PROJECT_BINARY_DIR}/test_headers.cc)
  target_compile_options(spectrumkv_test_headers PRIVATE ${SPECTRUMKV_QUICK_OPTIONS})
  target_link_libraries(spectrumkv_test_headers PRIVATE spectrumkv_flags GTest::gtest GTest::gmock absl::statusor
    absl::str_format absl::time)
  target_precompile_headers(spectrumkv_test_headers PRIVATE
    <algorithm> <array> <atomic> <chrono> <condition_variable> <deque> <filesystem> <fstream> <functional> <map>
    <memory> <mutex> <optional> <random> <set> <sstream> <string> <thread> <unordered_map> <utility> <vector>
    <gmock/gmock.h> <gtest/gtest.h> <absl/status/statusor.h> <absl/strings/str_cat.h> <absl/strings/str_format.h>
    <absl/time/time.h>)
endif()
