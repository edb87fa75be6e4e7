package comm_test

import (
	"errors"
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

// A closed part of a world refuses calls, and the world goes on.
func TestCallsOnAClosedPart(t *testing.T) {
	world := comm.NewLocal(1, nil, comm.Options{})[0]
	defer world.Close()
	part, err := world.Split(t.Context(), 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(part.Barrier(t.Context()), part.Close()); err != nil {
		t.Fatal(err)
	}
	if err := part.Barrier(t.Context()); !errors.Is(err, comm.ErrClosed) {
		t.Errorf("a call on the closed part: %v, want %v", err, comm.ErrClosed)
	}
	if err := world.Barrier(t.Context()); err != nil {
		t.Errorf("the world after its part: %v", err)
	}
}
