//go:build !portable

package files

import "testing"

// A file system that is not known to be local counts as remote.
func TestRemoteOfAnUnknownFileSystem(t *testing.T) {
	if !Remote("/proc") {
		t.Error("/proc counts as a disk of this host")
	}
}
