//go:build !linux || portable

package cpu

import "runtime"

func ownCores() int { return runtime.NumCPU() }
