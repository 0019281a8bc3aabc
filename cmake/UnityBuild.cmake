# Compiling several files at once (CMAKE_UNITY_BUILD, as scripts/demo and scripts/test do) costs a third of the time,
# but files that use the same name in an anonymous namespace cannot share a compilation. Include after the folders
# it names.
set_target_properties(spectrumkv_proto PROPERTIES UNITY_BUILD OFF) # generated code repeats its names

function(spectrumkv_compile_alone folder)
  foreach(file ${ARGN})
    set_source_files_properties(${PROJECT_SOURCE_DIR}/${folder}/${file}
      DIRECTORY ${PROJECT_SOURCE_DIR}/${folder} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endforeach()
endfunction()

spectrumkv_compile_alone(client/cpp pool.cc)
spectrumkv_compile_alone(client/sdk cache.cc)
spectrumkv_compile_alone(client/ctl pool_commands.cc transfer_commands.cc)
spectrumkv_compile_alone(server/pool overlap.cc)
spectrumkv_compile_alone(server/stream peer_server.cc stream_core.cc)
spectrumkv_compile_alone(server/transfer link.cc manager.cc parking.cc receiver.cc sender_plan.cc)
