//go:build !linux

package cpu

import "runtime"

// ownCores is how many cores this process may use.
func ownCores() int { return runtime.NumCPU() }
