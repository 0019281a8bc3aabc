# cmake -DSOURCE_DIR=... -DVERSION=... -DOUTPUT=... -P WriteVersion.cmake: writes OUTPUT only where it changes, so that
# a commit rebuilds one small file. A tree without git has the project's version alone.
set(SPECTRUMKV_VERSION ${VERSION})
set(SPECTRUMKV_VERSION_TEXT ${VERSION})
find_program(GIT git)
if(GIT AND EXISTS ${SOURCE_DIR}/.git)
  execute_process(COMMAND ${GIT} -c safe.directory=* describe --tags --always --dirty WORKING_DIRECTORY ${SOURCE_DIR}
    OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(described)
    string(APPEND SPECTRUMKV_VERSION_TEXT " (${described})")
  endif()
endif()
configure_file(${SOURCE_DIR}/cmake/version.cc.in ${OUTPUT} @ONLY)
