// Package worker is one rank's process: it attaches to the launcher that spawned it, joins
// the other ranks, does what its role says, and reports how that ended.
package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/agent"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/tensor"
)

// process is what every role has.
type process struct {
	*launch.Worker
	world  *comm.Group
	stream *tensor.HostStream
	phase  string // what the rank is at, for reports of failures
	step   int64

	start   *start // of a training run
	first   func() // ends the time of the first step; nil before it
	started bool   // what the start took has been told

	quiet bool // stopped on request: the role has said so itself
}

// Run is the whole life of a worker. exit ends the process; it is called at once when the
// launcher is gone.
func Run(role string, exit func(status int)) int {
	w, err := launch.Attach(func(cause error) {
		fmt.Fprintf(os.Stderr, "cprun worker: %v\n", cause)
		exit(launch.ExitFailed)
	})
	if err != nil {
		fmt.Fprintf(os.Stderr, "cprun: %v\n", err)
		return 2
	}
	p := &process{Worker: w, phase: "joining the ranks"}
	if err := p.run(agent.Role(role)); err != nil {
		fmt.Fprintf(os.Stderr, "cprun worker: rank %d: %v\n", w.Rank, err)
		if report := w.Fail(err, comm.IsRemote(err), p.phase, p.step); report != nil {
			fmt.Fprintf(os.Stderr, "cprun worker: %v\n", report)
		}
		return launch.ExitFailed
	}
	if !p.quiet {
		err = w.Done()
	} else {
		err = w.Stopped(p.step)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "cprun worker: %v\n", err)
		return launch.ExitFailed
	}
	return 0
}

func (p *process) run(role agent.Role) (err error) {
	ctx := context.Background()
	p.stream = tensor.NewHostStream("compute")
	var joining history
	p.world, err = comm.ConnectUnix(ctx, comm.Mesh{
		Dir: p.SocketDir, Rank: p.Rank, Size: p.WorldSize, Secret: p.Secret, RunID: p.RunID,
	}, p.stream, comm.Options{Deadline: config.Deadline, Log: joining.add})
	if err != nil {
		joining.print()
		return fmt.Errorf("connecting %d ranks: %w", p.WorldSize, err)
	}
	defer func() {
		if err != nil {
			// The others learn the cause from this rank, not just that it is gone.
			p.world.Abort(err)
			return
		}
		err = errors.Join(p.world.Close(), p.stream.Close())
	}()
	switch role {
	case agent.RoleTrain:
		return p.train(ctx)
	case agent.RoleAttention:
		return p.attention(ctx)
	case agent.RoleBench:
		return p.bench(ctx)
	}
	return fmt.Errorf("no role %q", role)
}

func (p *process) payload(v any) error {
	if err := json.Unmarshal(p.Payload, v); err != nil {
		return fmt.Errorf("payload of the launcher: %w", err)
	}
	return nil
}

// history keeps what the communicator says of connections made and refused, which is of
// interest when the ranks do not find each other, and noise when they do.
type history struct {
	mu    sync.Mutex
	lines []string // guarded by mu
}

// historyLines bounds what strangers at the door can make a rank remember.
const historyLines = 100

func (h *history) add(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.lines) < historyLines {
		h.lines = append(h.lines, fmt.Sprintf(format, args...))
	}
}

func (h *history) print() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, line := range h.lines {
		fmt.Fprintln(os.Stderr, line)
	}
}
