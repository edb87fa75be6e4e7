package command

import (
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/kernels/cpu"
)

// UseInstructions lets the environment choose what the CPU kernels of this process compute with. An error is an
// InputError.
func UseInstructions() error {
	if err := cpu.Use(launch.Getenv(launch.EnvCPU)); err != nil {
		return inputf("%s: %w; unset it for the best that there is", launch.EnvCPU, err)
	}
	return nil
}
