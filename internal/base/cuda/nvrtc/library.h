// NVRTC as a table of its functions, with the types of its header.
#ifndef CPRUN_NVRTC_LIBRARY_H
#define CPRUN_NVRTC_LIBRARY_H
#include <dlfcn.h>
#include <nvrtc.h>

#define CPRUN_NVRTC(F) \
	F(nvrtcVersion) F(nvrtcGetErrorString) F(nvrtcCreateProgram) F(nvrtcDestroyProgram) F(nvrtcCompileProgram) \
	F(nvrtcGetCUBINSize) F(nvrtcGetCUBIN) F(nvrtcGetProgramLogSize) F(nvrtcGetProgramLog)

#define CPRUN_MEMBER(name) __typeof__(&name) name;
typedef struct { CPRUN_NVRTC(CPRUN_MEMBER) } cprun_nvrtc_t;

// cprun_nvrtc_open fills the table from a library, or returns the reason for a failure.
static const char *cprun_nvrtc_open(cprun_nvrtc_t *t, const char *path) {
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib) return dlerror();
#define CPRUN_FIND(name) if (!(t->name = (__typeof__(t->name))dlsym(lib, #name))) return "it has no function " #name;
	CPRUN_NVRTC(CPRUN_FIND)
	return 0;
}

// cprun_nvrtc_where returns the path of the loaded library.
static const char *cprun_nvrtc_where(const cprun_nvrtc_t *t) {
	Dl_info i;
	return dladdr((void *)t->nvrtcVersion, &i) ? i.dli_fname : "";
}

// cprun_nvrtc_preload loads a library that NVRTC later requests by its name only.
static void cprun_nvrtc_preload(const char *path) { dlopen(path, RTLD_NOW | RTLD_LOCAL); }

static nvrtcResult cprun_nvrtc_version(const cprun_nvrtc_t *t, int *major, int *minor) {
	return t->nvrtcVersion(major, minor);
}
static const char *cprun_nvrtc_error(const cprun_nvrtc_t *t, nvrtcResult r) { return t->nvrtcGetErrorString(r); }
static nvrtcResult cprun_nvrtc_create(const cprun_nvrtc_t *t, nvrtcProgram *p, const char *code, const char *name,
	int n, const char **headers, const char **names) {
	return t->nvrtcCreateProgram(p, code, name, n, headers, names);
}
static nvrtcResult cprun_nvrtc_compile(const cprun_nvrtc_t *t, nvrtcProgram p, int n, const char **options) {
	return t->nvrtcCompileProgram(p, n, options);
}
static void cprun_nvrtc_destroy(const cprun_nvrtc_t *t, nvrtcProgram p) { t->nvrtcDestroyProgram(&p); }
static nvrtcResult cprun_nvrtc_cubin_size(const cprun_nvrtc_t *t, nvrtcProgram p, size_t *n) {
	return t->nvrtcGetCUBINSize(p, n);
}
static nvrtcResult cprun_nvrtc_cubin(const cprun_nvrtc_t *t, nvrtcProgram p, void *to) {
	return t->nvrtcGetCUBIN(p, to);
}
static nvrtcResult cprun_nvrtc_log_size(const cprun_nvrtc_t *t, nvrtcProgram p, size_t *n) {
	return t->nvrtcGetProgramLogSize(p, n);
}
static nvrtcResult cprun_nvrtc_log(const cprun_nvrtc_t *t, nvrtcProgram p, void *to) {
	return t->nvrtcGetProgramLog(p, to);
}
#endif
