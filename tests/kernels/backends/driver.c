/* A driver of CUDA that only notes launches: what Triton asks of libcuda.so.1, for a machine without a GPU.

   A launch becomes a line of text: the function, the grid, the block, shared memory, the stream, the attributes, and
   the bytes of each parameter. How many bytes a parameter has is read from the machine code, as a driver does. */

#include <elf.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define PARAMETERS 256

typedef struct {
  int number;
  unsigned count;
  unsigned size[PARAMETERS];
} Function;

static char noted[1 << 20];
static size_t end = 0;
static int functions = 0, pointers = 0;
static _Thread_local CUcontext current = NULL;

static void note(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  size_t room = sizeof noted - end;
  size_t size = vsnprintf(noted + end, room, format, arguments);
  va_end(arguments);
  if (size >= room)
    abort();
  end += size;
}

/* Return the lines since the last call. */
const char *take_noted(void) {
  static char taken[sizeof noted];
  memcpy(taken, noted, end);
  taken[end] = 0;
  end = 0;
  return taken;
}

/* Return how many pointers were asked about so far. */
int count_pointers(void) { return pointers; }

/* Read from machine code how many bytes each parameter of a kernel has. */
static int read_sizes(const char *image, const char *name, Function *function) {
  const Elf64_Ehdr *header = (const void *)image;
  const Elf64_Shdr *sections = (const void *)(image + header->e_shoff);
  const char *names = image + sections[header->e_shstrndx].sh_offset;
  for (int at = 0; at < header->e_shnum; ++at) {
    const char *own = names + sections[at].sh_name;
    if (strncmp(own, ".nv.info.", 9) || strcmp(own + 9, name))
      continue;
    const unsigned char *now = (const void *)(image + sections[at].sh_offset), *last = now + sections[at].sh_size;
    while (now < last) {
      unsigned format = now[0], kind = now[1], size = format == 4 ? now[2] | now[3] << 8 : 0;
      if (format == 4 && kind == 0x17) { /* a parameter */
        uint16_t ordinal;
        uint32_t about;
        memcpy(&ordinal, now + 8, sizeof ordinal);
        memcpy(&about, now + 12, sizeof about);
        if (ordinal >= PARAMETERS)
          return 0;
        function->size[ordinal] = about >> 18;
        if (function->count <= ordinal)
          function->count = ordinal + 1;
      }
      now += 4 + size;
    }
    for (unsigned each = 0; each < function->count; ++each)
      if (!function->size[each])
        return 0;
    return 1;
  }
  return 0;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) {
  const Function *function = (const void *)f;
  note("f%d grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%llu extra=%d attributes=", function->number,
       config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ,
       config->sharedMemBytes, (unsigned long long)(uintptr_t)config->hStream, extra != NULL);
  for (unsigned at = 0; at < config->numAttrs; ++at) {
    const CUlaunchAttribute *own = config->attrs + at;
    note("%d:", own->id);
    if (own->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      note("%u,%u,", own->value.clusterDim.x, own->value.clusterDim.y);
    note("%d;", own->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION ? (int)own->value.clusterDim.z : *(int *)&own->value);
  }
  note(" parameters=");
  for (unsigned at = 0; at < function->count; ++at) {
    for (unsigned byte = 0; byte < function->size[at]; ++byte)
      note("%02x", ((const unsigned char *)parameters[at])[byte]);
    note(at + 1 < function->count ? "," : "\n");
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image; /* only read while it is loaded */
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  Function *function = calloc(1, sizeof *function);
  function->number = functions++;
  *f = (CUfunction)function;
  return read_sizes((const char *)module, name, function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  ++pointers;
  *(CUdeviceptr *)data = pointer;
  return attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) { /* an H100's */
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 228 << 10; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 65536;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  *count = 2;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)(uintptr_t)(device + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = (CUdevice)(uintptr_t)current - 1;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "not what this driver knows";
  return CUDA_SUCCESS;
}

/* What succeeds without anything to do. */
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }
