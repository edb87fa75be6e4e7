//go:build !linux || portable

package files

import "os"

// Uncache does nothing: no portable call drops a file from the kernel's cache.
func Uncache(*os.File) {}

// Remote returns false: outside Linux a job has one node, so no other host writes its files.
func Remote(string) bool { return false }
