#ifndef CPRUN_DRIVER_STAND_IN_H
#define CPRUN_DRIVER_STAND_IN_H

// cprun_driver_t is the result of loading the driver.
typedef struct {
	char missing[512];  // names of needed functions that are missing
	char absent[512];   // the loader's error if there is no libcuda.so.1
	int version;        // the newest supported CUDA, 13000 for 13.0; 0: unknown
	int result;         // of cuInit, which is called if no function is missing
	char name[64];      // of the result, such as CUDA_ERROR_NO_DEVICE
	char text[128];     // of the result
} cprun_driver_t;

// cprun_driver_load must be called once, before any other function of the driver except the cuInit of gorgonia.org/cu.
void cprun_driver_load(cprun_driver_t *d);

// cprun_driver_built returns the CUDA version of the header at compile time.
int cprun_driver_built(void);
#endif
