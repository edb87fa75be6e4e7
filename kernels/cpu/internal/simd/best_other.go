//go:build !amd64 || portable

package simd

func best() Level { return Generic }
