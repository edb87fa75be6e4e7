//go:build !cuda

package train

import (
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/tensor"
)

// lanes are the streams that a group's transfers run on, as far as they are known.
func lanes(c comm.Communicator) []tensor.Stream {
	if g, ok := c.(*comm.Group); ok {
		return []tensor.Stream{g.Stream()}
	}
	return nil
}
