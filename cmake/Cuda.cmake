# SPECTRUMKV_CUDA=AUTO|ON|OFF -> SPECTRUMKV_HAVE_CUDA, true where nvcc and the static CUDA runtime are found; with it
# SPECTRUMKV_NVCC, CUDA::cudart_static and the functions below. Without it kernels/cuda has the same interface and says
# that there is no device.
set(SPECTRUMKV_HAVE_CUDA FALSE)
# Compiled to machine code; PTX for the last, which later devices compile when they load it.
set(SPECTRUMKV_CUDA_ARCHITECTURES 80 90 100 120)
set(SPECTRUMKV_NVCC_FLAGS -std=c++20 -O3 --expt-relaxed-constexpr -Werror all-warnings
  -I ${PROJECT_SOURCE_DIR})
# Contraction would change results (proto/WIRE_FORMAT.md, section Arithmetic), and so would fast math.
set(SPECTRUMKV_NVCC_ARITHMETIC -fmad=false)

if(NOT SPECTRUMKV_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "SPECTRUMKV_CUDA is ${SPECTRUMKV_CUDA}; it must be AUTO, ON or OFF")
endif()
if(SPECTRUMKV_CUDA STREQUAL "OFF")
  message(STATUS "CUDA: off (SPECTRUMKV_CUDA=OFF)")
  return()
endif()
find_program(SPECTRUMKV_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
set(missing "")
if(NOT SPECTRUMKV_NVCC)
  set(missing "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")
else()
  get_filename_component(CUDAToolkit_ROOT ${SPECTRUMKV_NVCC} DIRECTORY)
  # CMake 3.25.1, Debian 12's, sets a property of this target although CUDA 13 has no such library any more.
  if(CMAKE_VERSION VERSION_LESS 3.25.2 AND NOT TARGET CUDA::nvToolsExt)
    add_library(CUDA::nvToolsExt INTERFACE IMPORTED)
  endif()
  find_package(CUDAToolkit QUIET)
  if(NOT TARGET CUDA::cudart_static)
    set(missing "no static CUDA runtime (libcudart_static.a) beside ${SPECTRUMKV_NVCC}")
  elseif(CUDAToolkit_VERSION VERSION_LESS 12.8)
    set(missing "nvcc ${CUDAToolkit_VERSION} is too old for the architectures shipped; it must be 12.8 or later")
  endif()
endif()
if(missing)
  if(SPECTRUMKV_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SPECTRUMKV_CUDA=ON, but: ${missing}")
  endif()
  message(STATUS "CUDA: off (${missing})")
  return()
endif()
message(STATUS "CUDA: on (${SPECTRUMKV_NVCC} ${CUDAToolkit_VERSION})")
set(SPECTRUMKV_HAVE_CUDA TRUE)

# Compiles a .cu file of this folder to an object for all architectures; its path goes to `out`.
function(spectrumkv_nvcc_object source out)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${source}.o)
  set(code "")
  foreach(architecture ${SPECTRUMKV_CUDA_ARCHITECTURES})
    list(APPEND code -gencode arch=compute_${architecture},code=sm_${architecture})
    set(last ${architecture})
  endforeach()
  list(APPEND code -gencode arch=compute_${last},code=compute_${last})
  add_custom_command(OUTPUT ${object}
    COMMAND ${SPECTRUMKV_NVCC} ${SPECTRUMKV_NVCC_FLAGS} ${SPECTRUMKV_NVCC_ARITHMETIC} ${code} -Xcompiler -fPIC -MD -MF ${object}.d -MT ${object}
      -c ${CMAKE_CURRENT_SOURCE_DIR}/${source} -o ${object}
    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${source} DEPFILE ${object}.d VERBATIM
    COMMENT "nvcc ${source} for ${SPECTRUMKV_CUDA_ARCHITECTURES}")
  set(${out} ${object} PARENT_SCOPE)
endfunction()

# Compiles a .cu file (a full path) to PTX for one architecture, as `ptx`, with the flags for arithmetic given behind.
function(spectrumkv_nvcc_ptx source architecture ptx)
  add_custom_command(OUTPUT ${ptx}
    COMMAND ${SPECTRUMKV_NVCC} ${SPECTRUMKV_NVCC_FLAGS} ${ARGN} -arch=compute_${architecture} -ptx
      -MD -MF ${ptx}.d -MT ${ptx} ${source} -o ${ptx}
    DEPENDS ${source} DEPFILE ${ptx}.d VERBATIM COMMENT "nvcc -ptx for compute_${architecture}")
endfunction()
