package copyengine

import (
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/tensor"
)

// TestCopyEngine runs the suite with exchanges by the copy engine, over fake devices, and all
// other calls by a host group.
func TestCopyEngine(t *testing.T) {
	commtest.TestCommunicator(t, func(t *testing.T, compute []tensor.Stream, opts comm.Options) []comm.Communicator {
		cs, err := fakeWorld(compute, opts)
		if err != nil {
			t.Fatal(err)
		}
		return cs
	})
}
