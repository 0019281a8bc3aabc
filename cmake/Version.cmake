# spectrumkv_version: cmake/version.h. Written at configure and again at each build.
set(version_cc ${PROJECT_BINARY_DIR}/generated/version.cc)
set(write_version ${CMAKE_COMMAND} -DSOURCE_DIR=${PROJECT_SOURCE_DIR} -DVERSION=${PROJECT_VERSION}
  -DOUTPUT=${version_cc} -P ${PROJECT_SOURCE_DIR}/cmake/WriteVersion.cmake)
execute_process(COMMAND ${write_version})
add_custom_target(spectrumkv_write_version COMMAND ${write_version} BYPRODUCTS ${version_cc} VERBATIM)
add_library(spectrumkv_version STATIC ${version_cc})
target_link_libraries(spectrumkv_version PRIVATE spectrumkv_flags)
add_dependencies(spectrumkv_version spectrumkv_write_version)
