//go:build !linux || portable

package cpu

import "runtime"

// ownCores returns the number of cores of this host.
func ownCores() int { return runtime.NumCPU() }
