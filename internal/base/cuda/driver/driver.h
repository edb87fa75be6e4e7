#ifndef CPRUN_DRIVER_STAND_IN_H
#define CPRUN_DRIVER_STAND_IN_H

// cprun_driver_t is what came of loading the driver.
typedef struct {
	char missing[512];  // names of needed functions that it has not, if any
	char absent[512];   // what the loader said if there is no libcuda.so.1
	int version;        // the newest CUDA that it can run, 13000 for 13.0; 0: not known
	int result;         // of cuInit, which is called if nothing is missing
	char name[64];      // of the result, such as CUDA_ERROR_NO_DEVICE
	char text[128];     // of the result
} cprun_driver_t;

// cprun_driver_load is called once, before any other function of the driver but the cuInit of
// gorgonia.org/cu.
void cprun_driver_load(cprun_driver_t *d);

// cprun_driver_built is the version of CUDA whose header this was compiled with.
int cprun_driver_built(void);
#endif
