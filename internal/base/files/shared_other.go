//go:build !linux || portable

package files

// Remote returns false: outside Linux a job has one node, so no other host writes its files.
func Remote(string) bool { return false }
