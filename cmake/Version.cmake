# spectrumkv_version: cmake/version.h. Written at configure and again at each build.
set(SPECTRUMKV_REVISION "" CACHE STRING "The commit that builds report, where the tree brings no .git with it")
set(version_cc ${PROJECT_BINARY_DIR}/generated/version.cc)
set(write_version ${CMAKE_COMMAND} -DSOURCE_DIR=${PROJECT_SOURCE_DIR} -DVERSION=${PROJECT_VERSION}
  -DREVISION=${SPECTRUMKV_REVISION}
  -DOUTPUT=${version_cc} -P ${PROJECT_SOURCE_DIR}/cmake/WriteVersion.cmake)
execute_process(COMMAND ${write_version})
add_custom_target(spectrumkv_write_version COMMAND ${write_version} BYPRODUCTS ${version_cc} VERBATIM)
add_library(spectrumkv_version STATIC ${version_cc})
target_link_libraries(spectrumkv_version PRIVATE spectrumkv_flags)
add_dependencies(spectrumkv_version spectrumkv_write_version)
