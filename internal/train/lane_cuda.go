//go:build cuda

package train

import (
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/tensor"
)

// lanes are the streams that a group's transfers run on, as far as they are known.
func lanes(c comm.Communicator) (out []tensor.Stream) {
	switch g := c.(type) {
	case *comm.Group:
		out = append(out, g.Stream())
	case *comm.DeviceGroup:
		out = append(out, g.Stream())
		for _, s := range g.CopyStreams() {
			out = append(out, s)
		}
	}
	return out
}
