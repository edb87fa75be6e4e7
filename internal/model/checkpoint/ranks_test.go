package checkpoint

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
)

// worlds lists the groups that tests have made. closing closes them.
var worlds []*comm.Group

// world returns a group of n ranks that are goroutines of this process.
func world(n int) []*comm.Group {
	groups := comm.NewLocal(n, nil, comm.Options{})
	worlds = append(worlds, groups...)
	return groups
}

// closing closes the worlds after the tests, before the check for leaked goroutines, and removes the templates.
type closing struct{ *testing.M }

func (c closing) Run() int {
	code := c.M.Run()
	for _, g := range worlds {
		g.Close()
	}
	for _, dir := range templates {
		_ = os.RemoveAll(dir) // only temporary files
	}
	return code
}

// A lost rank counts as a no; else a save would be committed without its shard.
func TestAllFailsWithARank(t *testing.T) {
	world := comm.NewLocal(2, nil, comm.Options{Deadline: 20 * time.Second})
	lost := errors.New("lost")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(lost)
	if yes, err := (ranks{world[0]}).all(ctx, true); yes || !errors.Is(err, lost) { // rank 1 does not answer
		t.Errorf("All = %t, %v", yes, err)
	}
	world[1].Abort(lost)
	if yes, err := (ranks{world[0]}).all(t.Context(), true); yes || err == nil {
		t.Errorf("All = %t, %v", yes, err)
	}
	for _, g := range world {
		g.Close()
	}
}

// A peer may announce at most maxBlob bytes.
func TestBlobsAreBounded(t *testing.T) {
	world := comm.NewLocal(1, nil, comm.Options{})
	defer world[0].Close()
	for n, want := range map[int]bool{maxBlob: true, maxBlob + 1: false, -1: false} {
		if _, err := (ranks{world[0]}).sizes(t.Context(), n); (err == nil) != want {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}
