# SPECTRUMKV_PYTHON: the interpreter of tests and scripts; the checkout's .venv where there is one.
if(EXISTS ${PROJECT_SOURCE_DIR}/.venv/bin/python3)
  set(SPECTRUMKV_PYTHON ${PROJECT_SOURCE_DIR}/.venv/bin/python3)
else()
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  set(SPECTRUMKV_PYTHON ${Python3_EXECUTABLE})
endif()
