package comm_test

import (
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/tensor"
)

func communicators(gs []*comm.Group) []comm.Communicator {
	cs := make([]comm.Communicator, len(gs))
	for i, g := range gs {
		cs[i] = g
	}
	return cs
}

func TestLocal(t *testing.T) {
	commtest.TestCommunicator(t, func(_ *testing.T, compute []tensor.Stream, opts comm.Options) []comm.Communicator {
		return communicators(comm.NewLocal(len(compute), compute, opts))
	})
}
