# spectrumkv_fuzz(name LIBS ... CORPUS folder [SUFFIX text] [MUTATIONS n] [TEST source] [COMPILE_OPTIONS ...])
# The fuzz target tests/fuzz/<name>_fuzz.cc, up to three times:
#   <name>_replay   any compiler: every file of CORPUS (that ends in SUFFIX) as it is, then MUTATIONS of them
#   TEST            any compiler: <name>_fuzz_test, a GoogleTest program that makes inputs the corpus cannot hold
#   <name>_fuzz     with SPECTRUMKV_FUZZERS: libFuzzer from CORPUS for SPECTRUMKV_FUZZ_SECONDS (tests/fuzz/run.sh)
set(SPECTRUMKV_FUZZ_FOLDER ${PROJECT_SOURCE_DIR}/tests/fuzz)
add_custom_target(fuzzers) # all that tests labelled fuzz and libfuzzer run

function(spectrumkv_fuzz name)
  cmake_parse_arguments(ARG "" "CORPUS;SUFFIX;MUTATIONS;TEST" "LIBS;COMPILE_OPTIONS" ${ARGN})
  if(NOT SPECTRUMKV_TESTS)
    return()
  endif()
  if(NOT IS_DIRECTORY ${ARG_CORPUS})
    message(FATAL_ERROR "spectrumkv_fuzz(${name}): there is no corpus ${ARG_CORPUS}")
  endif()
  set(target ${SPECTRUMKV_FUZZ_FOLDER}/${name}_fuzz.cc)
  if(NOT ARG_MUTATIONS)
    set(ARG_MUTATIONS 0)
  endif()
  set(suffix "")
  if(ARG_SUFFIX)
    set(suffix --suffix ${ARG_SUFFIX})
  endif()
  add_executable(${name}_replay ${target} ${SPECTRUMKV_FUZZ_FOLDER}/replay_main.cc)
  target_link_libraries(${name}_replay PRIVATE spectrumkv_flags ${ARG_LIBS})
  add_test(NAME ${name}_replay
    COMMAND ${name}_replay --mutations ${ARG_MUTATIONS} --seed 20261129 ${suffix} ${ARG_CORPUS})
  set_tests_properties(${name}_replay PROPERTIES LABELS fuzz TIMEOUT 300
    ENVIRONMENT "${SPECTRUMKV_TEST_ENVIRONMENT}")
  add_dependencies(fuzzers ${name}_replay)
  if(ARG_TEST)
    spectrumkv_test(${name}_fuzz_test LABELS fuzz SOURCES ${ARG_TEST} ${target} LIBS ${ARG_LIBS}
      COMPILE_OPTIONS ${ARG_COMPILE_OPTIONS})
    target_compile_definitions(${name}_fuzz_test PRIVATE SPECTRUMKV_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    add_dependencies(fuzzers ${name}_fuzz_test)
  endif()
  if(SPECTRUMKV_FUZZERS)
    add_executable(${name}_fuzz ${target})
    target_link_libraries(${name}_fuzz PRIVATE spectrumkv_flags ${ARG_LIBS})
    target_compile_options(${name}_fuzz PRIVATE -fsanitize=fuzzer)
    target_link_options(${name}_fuzz PRIVATE -fsanitize=fuzzer)
    add_dependencies(fuzzers ${name}_fuzz)
    add_test(NAME ${name}_fuzz
      COMMAND ${SPECTRUMKV_FUZZ_FOLDER}/run.sh $<TARGET_FILE:${name}_fuzz> ${ARG_CORPUS} ${ARG_SUFFIX})
    # run.sh ends by itself after SPECTRUMKV_FUZZ_SECONDS, whatever that is.
    set_tests_properties(${name}_fuzz PROPERTIES LABELS libfuzzer TIMEOUT 86400
      ENVIRONMENT "${SPECTRUMKV_TEST_ENVIRONMENT}")
  endif()
endfunction()
