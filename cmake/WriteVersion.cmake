# cmake -DSOURCE_DIR=... -DVERSION=... -DOUTPUT=... -P WriteVersion.cmake: writes OUTPUT only where it changes, so that
# a commit rebuilds one small file. The revision of a tree that is no git checkout, or of one without commits, is
# "unknown"; it is never that of a repository further up. -DREVISION=... names it where the tree was copied without .git.
set(SPECTRUMKV_VERSION ${VERSION})
set(SPECTRUMKV_REVISION unknown)
find_program(GIT git)
if(NOT "${REVISION}" STREQUAL "")
  set(SPECTRUMKV_REVISION "${REVISION}")
elseif(GIT AND EXISTS ${SOURCE_DIR}/.git)
  execute_process(COMMAND ${GIT} -c safe.directory=* describe --always --dirty --abbrev=12 --exclude=*
    WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE revision RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET)
  if(failed EQUAL 0 AND revision)
    set(SPECTRUMKV_REVISION ${revision})
  endif()
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/version.cc.in ${OUTPUT} @ONLY)
