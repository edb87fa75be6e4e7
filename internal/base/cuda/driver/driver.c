//go:build cuda

// A replacement of libcuda at link time. Each function is one jump through a pointer, which keeps the caller's
// arguments in registers and on the stack, so signatures are not repeated here. After the driver is loaded, the
// pointers lead to it.
#define _GNU_SOURCE
#include "driver.h"
#include "functions.h"

#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define CPRUN_FUNCTIONS(F) CPRUN_DRIVER_NEEDED(F) CPRUN_DRIVER_UNUSED(F)
#define HIDDEN __attribute__((visibility("hidden")))

// Calls fail with this until the driver is loaded. It reads no arguments, so it can replace any function.
HIDDEN CUresult cprun_driver_unready(void) { return CUDA_ERROR_NOT_INITIALIZED; }

// Used for functions that a loaded driver lacks and nothing calls.
static CUresult newer(void) { return CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER; }

// gorgonia.org/cu calls cuInit at the start of the program, and exits if that fails. Here, cuInit succeeds and does
// nothing. Loading the driver calls the driver's cuInit.
static CUresult later(void) { return CUDA_SUCCESS; }

// The pointers: cprun_at_cuMemAlloc_v2 and so on. The additional macro lets cuda.h replace the name.
#define POINTER(name) POINTER_(name)
#define POINTER_(name) HIDDEN void *cprun_at_##name = (void *)cprun_driver_unready;
CPRUN_FUNCTIONS(POINTER)

#if defined(__x86_64__)
#define JUMP(to) "jmp *" to "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(to) "adrp x16, " to "\nldr x16, [x16, :lo12:" to "]\nbr x16\n"
#else
#error "the jump through a pointer is to be written for this processor"
#endif

// The functions are hidden, so that libraries that are loaded later use the driver's.
#define FUNCTION(name) FUNCTION_(name)
#define FUNCTION_(name) \
	__asm__(".pushsection .text\n.p2align 4\n.globl " #name "\n.hidden " #name "\n.type " #name ", %function\n" \
	        #name ":\n" JUMP("cprun_at_" #name) ".size " #name ", .-" #name "\n.popsection");
CPRUN_FUNCTIONS(FUNCTION)

__attribute__((constructor)) static void defer_init(void) { cprun_at_cuInit = (void *)later; }

static const struct {
	const char *name;
	void **at;
	int needed;
} functions[] = {
#define ENTRY(name, needed) ENTRY_(name, needed)
#define ENTRY_(name, needed) {#name, &cprun_at_##name, needed},
#define NEEDED(name) ENTRY(name, 1)
#define UNUSED(name) ENTRY(name, 0)
	CPRUN_DRIVER_NEEDED(NEEDED) CPRUN_DRIVER_UNUSED(UNUSED)
};
#define COUNT (sizeof functions / sizeof *functions)

// add_name appends a name to a list if it fits.
static void add_name(char *list, size_t room, const char *name) {
	size_t n = strlen(list);
	snprintf(list + n, room - n, "%s%s", n ? ", " : "", name);
}

// look_up finds the functions in the driver, and lists the needed ones that are missing.
static void look_up(cprun_driver_t *d, void *lib, void *found[COUNT]) {
	for (size_t i = 0; i < COUNT; i++) {
		found[i] = dlsym(lib, functions[i].name);
		if (!found[i] && functions[i].needed) add_name(d->missing, sizeof d->missing, functions[i].name);
	}
}

// describe sets the name and the text of cuInit's result.
static void describe(cprun_driver_t *d) {
	const char *name = NULL, *text = NULL;
	cuGetErrorName(d->result, &name);
	cuGetErrorString(d->result, &text);
	snprintf(d->name, sizeof d->name, "%s", name ? name : "an unknown error");
	snprintf(d->text, sizeof d->text, "%s", text ? text : "");
}

void cprun_driver_load(cprun_driver_t *d) {
	memset(d, 0, sizeof *d);
	// Global, like a linked library, for other libraries that may rely on it.
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	if (!lib) {
		snprintf(d->absent, sizeof d->absent, "%s", dlerror());
		return;
	}
	void *found[COUNT];
	look_up(d, lib, found);
	CUresult (*version)(int *) = (CUresult(*)(int *))dlsym(lib, "cuDriverGetVersion");
	if (!version || version(&d->version) != CUDA_SUCCESS) d->version = 0;
	if (*d->missing) return;
	for (size_t i = 0; i < COUNT; i++) *functions[i].at = found[i] ? found[i] : (void *)newer;
	d->result = cuInit(0);
	describe(d);
}

int cprun_driver_built(void) { return CUDA_VERSION; }
