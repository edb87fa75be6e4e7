// Package worker implements the process of one rank. Run attaches to the launcher that spawned the process, connects to
// the other ranks, runs the role of the task (see package job), and reports the result:
//
//	os.Exit(worker.Run("train", os.Exit))
package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/comm"
	commdevice "github.com/cprun/cprun/comm/device"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/run/attend"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/tensor"
)

type process struct {
	*launch.Worker
	world  *comm.Group
	joined chan struct{}     // closed when world is set
	gpus   *commdevice.Group // nil on CPUs
	moves  string            // transport between GPUs, as in commdevice.Options
	stream *tensor.HostStream
	where  activity

	start *start // times of the parts of a start; nil after the first step of a run on GPUs, and on CPUs
	first func() // called at the end of that

	stopped bool // the role ended on request
	// atEnd closes what the role opened, the last first. After a failure, the process ends without.
	atEnd []func() error
}

// Run runs a worker and returns its exit status. If the launcher is gone, it calls exit, which ends the process.
func Run(role string, exit func(status int)) int {
	w, err := launch.Attach(func(cause error) {
		fmt.Fprintf(os.Stderr, "cprun worker: %v\n", cause)
		exit(launch.ExitFailed)
	})
	if err != nil {
		fmt.Fprintf(os.Stderr, "cprun: %v\n", err)
		return 2
	}
	p := &process{Worker: w, stream: tensor.NewHostStream("compute"), joined: make(chan struct{}),
		start: &start{began: time.Now()}}
	p.where.enter("joining the ranks")
	w.OnStatus(p.waitState)
	if err := p.run(job.Role(role)); err != nil {
		launch.LogFailure(err)
		p.fail(err)
		return launch.ExitFailed
	}
	if _, step := p.where.at(); p.stopped {
		err = w.Stopped(step)
	} else {
		err = w.Done()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "cprun worker: %v\n", err)
		return launch.ExitFailed
	}
	return 0
}

// fail reports the failure of this rank to the launcher. After a timeout, every rank also logs its own waits. A rank
// that waited for long does so after any error: it may first see the end of a peer that the launcher killed.
func (p *process) fail(err error) {
	s := p.waitState()
	late := errors.Is(err, comm.ErrDeadline)
	if late || waitedLong(&s) {
		s.Clean()
		fmt.Fprintf(os.Stderr, "cprun worker: %s\n", &s)
	}
	f := launch.Failure{Cause: err.Error(), Remote: comm.IsRemote(err), TimedOut: late, WaitState: &s}
	f.Phase, f.Step = p.where.at()
	if err := p.Fail(f); err != nil {
		fmt.Fprintf(os.Stderr, "cprun worker: %v\n", err)
	}
}

func (p *process) run(role job.Role) (err error) {
	ctx := context.Background()
	var mu sync.Mutex
	var joining terminal.Faults // the log of connections, which is of interest if the ranks cannot connect
	options := comm.Options{Deadline: config.Deadline, Log: func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		joining.Addf(format, args...)
	}}
	connected := p.start.time("connecting the ranks")
	if p.world, err = p.join(p.untilFailure(ctx, p.Failed()), options); err != nil {
		mu.Lock()
		defer mu.Unlock()
		if log := joining.Err(); log != nil {
			fmt.Fprintln(os.Stderr, log)
		}
		return fmt.Errorf("connecting %d ranks: %w", p.WorldSize, err)
	}
	close(p.joined)
	connected()
	if err := comm.SharesMemory(); err != nil && p.LocalRank == 1 { // one rank logs it
		fmt.Fprintf(os.Stderr, "ranks of this node use sockets, since they cannot share memory: %v\n", err)
	}
	p.where.join(p.world)
	err = p.play(ctx, role)
	for _, closing := range slices.Backward(p.atEnd) {
		if err == nil {
			err = closing()
		}
	}
	if err != nil {
		p.world.Abort(err) // sends the cause to the other ranks
		return err
	}
	return errors.Join(p.world.Close(), p.stream.Close())
}

func (p *process) closing(f func() error) { p.atEnd = append(p.atEnd, f) }

func (p *process) play(ctx context.Context, role job.Role) error {
	switch role {
	case job.RoleTrain:
		return p.session(ctx, true, p.train)
	case job.RoleEval:
		return p.session(ctx, false, p.eval)
	case job.RoleVerify:
		return p.session(ctx, true, p.verify)
	case job.RoleAttention:
		return p.attention(ctx)
	case job.RoleBench:
		return p.bench(ctx)
	}
	return fmt.Errorf("no role %q", role)
}

// join connects this rank with the ranks of its node over Unix sockets, and with the ranks of other nodes over TCP. For
// the latter it needs the addresses that the launchers exchange.
func (p *process) join(ctx context.Context, opts comm.Options) (*comm.Group, error) {
	mesh := comm.Mesh{Dir: p.SocketDir, Rank: p.Rank, Size: p.WorldSize, Secret: p.Secret, RunID: p.RunID}
	if p.Listen == "" {
		return comm.Connect(ctx, mesh, p.stream, opts)
	}
	mesh.Name = fmt.Sprintf("pid %d on %s", os.Getpid(), p.Node)
	mesh.Nodes = nodes(p.Hosts)
	ln, err := comm.Listen(ctx, p.Listen)
	if err != nil {
		return nil, fmt.Errorf("listening for ranks of other nodes: %w; set --interface to an address of this host",
			err)
	}
	if err := p.Listening(ln.Addr().String()); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	if mesh.Addrs, err = p.addresses(ctx, opts.Deadline); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	mesh.Listener = ln
	return comm.Connect(ctx, mesh, p.stream, opts)
}

// addresses waits for the addresses of all ranks, which the launchers exchange.
func (p *process) addresses(ctx context.Context, limit time.Duration) ([]string, error) {
	select {
	case addrs := <-p.Peers():
		return addrs, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-time.After(limit):
	}
	first := p.Rank - p.LocalRank // the first rank of this node
	var others []string
	lowest := 0
	if next := first + p.LocalWorldSize; next < p.WorldSize {
		others, lowest = append(others, launch.RanksOf(next, p.WorldSize-next)), next
	}
	if first > 0 {
		others, lowest = append(others, launch.RanksOf(0, first)), 0
	}
	return nil, &comm.PeerError{
		Rank: lowest, Name: strings.Join(others, ", "), Op: "connect",
		Cause: fmt.Errorf("no addresses within %v: a worker of another node has not started; see launcher.log and "+
			"launcher-*.log: %w", limit, comm.ErrDeadline),
	}
}

func nodes(hosts []string) []int {
	number := map[string]int{}
	var by []int
	for _, h := range hosts {
		if _, ok := number[h]; !ok {
			number[h] = len(number)
		}
		by = append(by, number[h])
	}
	return by
}

// abortTime bounds the wait for the cause of a failure from the other ranks.
const abortTime = time.Second

// untilFailure returns a context for joining the ranks. It ends when the launcher reports a failed rank or node. Once
// the ranks are connected, that ends the world instead, unless the ranks end it first.
func (p *process) untilFailure(ctx context.Context, reported <-chan launch.Failed) context.Context {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() { // ends with the process
		failed := <-reported
		peer := comm.PeerError{Rank: failed.Rank, Name: fmt.Sprintf("rank %d", failed.Rank), Op: "connect",
			Cause: errors.New("it failed before the ranks were connected")}
		cancel(&peer)
		<-p.joined
		time.Sleep(abortTime)
		wait := peer
		wait.Op, wait.Cause = "wait", errors.New(cmp.Or(failed.Reason, "it failed, as the launcher reports"))
		p.world.Abort(&wait)
	}()
	return ctx
}

func (p *process) payload(v any) error {
	if err := json.Unmarshal(p.Payload, v); err != nil {
		return fmt.Errorf("payload of the launcher: %w", err)
	}
	return nil
}

// start records the duration of the parts of a start, up to the first step. Parts may overlap.
type start struct {
	mu    sync.Mutex
	began time.Time
	parts []part // guarded by mu; in order of their beginning
}

type part struct {
	name string
	took time.Duration
}

// time begins a part, and returns a function that ends it.
func (s *start) time(name string) (end func()) {
	began := time.Now()
	s.mu.Lock()
	i := len(s.parts)
	s.parts = append(s.parts, part{name: name})
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.parts[i].took = time.Since(began)
	}
}

// String returns a line for the log: "first step done in 3.21 s: context 0.90, weights 1.10, ...".
func (s *start) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	parts := make([]string, len(s.parts))
	for i, p := range s.parts {
		parts[i] = fmt.Sprintf("%s %.2f", p.name, p.took.Seconds())
	}
	return fmt.Sprintf("first step done in %.2f s: %s (s; parts may overlap)", time.Since(s.began).Seconds(),
		strings.Join(parts, ", "))
}

func (p *process) attention(ctx context.Context) error {
	p.where.enter("attention")
	var spec attend.Spec
	if err := p.payload(&spec); err != nil {
		return err
	}
	c, err := attend.Open(spec.In)
	if err != nil {
		return err
	}
	defer c.Close()
	dtype, err := spec.Element()
	if err != nil {
		return err
	}
	dev, world, err := p.device(ctx, device.CUDAOptions{
		Backend: spec.Backend, Compute: dtype, Machine: spec.Machine,
		Packed: c.Masks.Docs != nil,
	})
	if err != nil {
		return err
	}
	p.where.enter("attention")
	report, err := c.Run(ctx, spec, world, &dev)
	if err == nil && p.Rank == 0 {
		err = p.SendData(job.EventReport, 0, report)
	}
	return err
}

// device opens this rank's device, and the group of all ranks whose calls are ordered with it.
func (p *process) device(ctx context.Context, o device.CUDAOptions) (device.Device, comm.Communicator, error) {
	if !o.Machine.IsCPU() {
		p.where.enter("opening the GPU")
		return p.gpu(ctx, o)
	}
	core, err := p.KeepToCore()
	switch {
	case err != nil: // costs only speed
		fmt.Fprintf(os.Stderr, "cprun worker: rank %d runs on any core: %v\n", p.Rank, err)
	case core >= 0 && p.LocalRank > 0: // rank 0 prints to the terminal
		fmt.Fprintf(os.Stderr, "rank %d runs on core %d only\n", p.Rank, core)
	}
	dev := device.CPU(p.stream, o.Backend, o.Compute)
	dev.Machine.Hosts = o.Machine.Hosts
	p.closing(dev.Close)
	return dev, p.world, nil
}
