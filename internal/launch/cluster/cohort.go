package cluster

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

const (
	// The machine checks its limits every ticking.
	ticking = 200 * time.Millisecond
	// farewells bounds the waits of Close: for the others to hear of it, and for goroutines to end.
	farewells = 3 * tellingTime
)

// Cohort is this agent's part in the job. It implements launch.Cohort.
type Cohort struct {
	cfg   Config
	self  Member
	party wire.Party // of connections that come in
	door  *wire.Door
	disco Discovery

	ctx    context.Context // of all goroutines
	cancel context.CancelFunc
	group  sync.WaitGroup

	events chan func() // from connections; loop runs them
	calls  mailbox     // from callers, who do not wait

	machine *machine              // loop's
	links   map[string]*wire.Link // loop's, as linked
	linked  map[string]time.Time  // since when each is there
	frame   wire.Frame            // loop's: of sending
	sending *message              // loop's

	greeting atomic.Pointer[[]byte]
	dialing  sync.Map // addresses that are being connected to

	next     chan next // room for one
	verdicts chan launch.Verdict
	heard    atomic.Pointer[chan launch.News]
	left     chan struct{}
	leave    sync.Once
	close    sync.Once
}

// A next holds the results of Next.
type next struct {
	decision *decision
	err      error
}

// Join begins to look for the other agents of the job, and returns at once; Next waits for them. Call Close
// at the end.
func Join(ctx context.Context, cfg Config) (*Cohort, error) {
	plain := cfg.Network == nil && cfg.Discovery == nil
	if err := cfg.resolve(); err != nil {
		return nil, err
	}
	if plain {
		cfg = withGossip(cfg)
	}
	id, err := wire.NewIdentity()
	if err != nil {
		return nil, err
	}
	ln, first, err := listen(&cfg)
	if err != nil {
		return nil, err
	}
	c := &Cohort{
		cfg: cfg, events: make(chan func()), links: map[string]*wire.Link{}, linked: map[string]time.Time{},
		next: make(chan next, 1), verdicts: make(chan launch.Verdict, 1), left: make(chan struct{}),
		self: Member{
			Name: id.Name(cfg.Host), Host: cfg.Host, HostID: cfg.HostID, NodeRank: cfg.NodeRank, NProc: cfg.NProc,
			Addr: ln.Addr().String(),
		},
	}
	c.calls.init()
	c.party = wire.Party{
		Identity: id, Job: cfg.Job, Key: cfg.Key, Silence: cfg.Silence,
		Hello: func() []byte { return *c.greeting.Load() }, Check: c.welcome,
	}
	c.ctx, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if cfg.Discovery != nil {
		if c.disco, err = cfg.Discovery(Found{c.self.Name, c.self.Addr}); err != nil {
			ln.Close()
			c.cancel()
			return nil, err
		}
	}
	c.machine = newMachine(&c.cfg, c.self, c, time.Now())
	c.machine.meets = cfg.Meets && first
	c.renewGreeting()
	c.door = wire.Open(ln, &c.party, func(l *wire.Link) { c.admit(l, "") }, c.strange)
	c.group.Go(c.loop)
	return c, nil
}

// listen opens the control port. first reports whether it has the port of the meeting place.
func listen(cfg *Config) (ln net.Listener, first bool, err error) {
	if cfg.Port != 0 {
		ln, err = cfg.Network.Listen(net.JoinHostPort(cfg.Listen, strconv.Itoa(cfg.Port)))
		if err == nil {
			return ln, true, nil
		}
	}
	ln, err = cfg.Network.Listen(net.JoinHostPort(cfg.Listen, "0"))
	if err != nil {
		return nil, false, fmt.Errorf("control connections of the job's nodes: %w", err)
	}
	return ln, false, nil
}

// loop owns the machine: nothing else touches it.
func (c *Cohort) loop() {
	tick := time.NewTicker(ticking)
	defer tick.Stop()
	defer func() {
		for _, l := range c.links {
			l.Close()
		}
	}()
	var changed <-chan struct{}
	if c.disco != nil {
		changed = c.disco.Changed()
		c.machine.onHints(c.disco.Peers())
	}
	for {
		select {
		case f := <-c.events:
			c.step(f)
		case <-c.calls.ready:
			for _, f := range c.calls.take() {
				c.step(f)
			}
		case <-tick.C:
			c.step(c.machine.tick)
		case <-changed:
			c.step(func() { c.machine.onHints(c.disco.Peers()) })
		case <-c.ctx.Done():
			return
		}
	}
}

func (c *Cohort) step(f func()) {
	c.machine.now = time.Now()
	f()
	c.renewGreeting()
}

// Next waits until the agents agree on the next start of all workers, or on the end of the job.
func (c *Cohort) Next(ctx context.Context) (launch.Start, error) {
	select {
	case <-c.next: // of a call that was given up
	default:
	}
	c.calls.put(func() { c.machine.next() })
	select {
	case n := <-c.next:
		if n.err != nil {
			return launch.Start{}, n.err
		}
		return c.begun(n.decision), nil
	case <-ctx.Done():
		c.calls.put(func() { c.machine.local.waiting = false })
		return launch.Start{}, context.Cause(ctx)
	case <-c.ctx.Done():
		return launch.Start{}, errClosed
	}
}

// begun returns the start of d on this agent.
func (c *Cohort) begun(d *decision) launch.Start {
	w := &d.World
	me := w.Agents[w.index(c.self.Name)]
	s := launch.Start{
		Number: w.Restart, Secret: d.Secret, Payload: d.Payload,
		Place: launch.Place{NodeRank: me.NodeRank, FirstRank: me.FirstRank, WorldSize: w.Size},
	}
	if len(w.Agents) > 1 {
		s.Listen = c.cfg.Listen
		for _, a := range w.Agents {
			s.Hosts = append(s.Hosts, slices.Repeat([]string{a.HostID}, a.NProc)...)
		}
	}
	return s
}

// News returns the channel of the other agents' news of the present start.
func (c *Cohort) News() <-chan launch.News {
	if ch := c.heard.Load(); ch != nil {
		return *ch
	}
	return nil
}

// Say tells the other agents something about the present start.
func (c *Cohort) Say(n launch.News) { c.calls.put(func() { c.machine.say(n) }) }

// End tells how the start has ended here, and returns how it ended for the job. If ctx has ended, it
// waits for the others a moment only.
func (c *Cohort) End(ctx context.Context, e launch.Ending) launch.Verdict {
	select {
	case <-c.verdicts:
	default:
	}
	c.calls.put(func() { c.machine.endHere(e) })
	select {
	case v := <-c.verdicts:
		return v
	case <-ctx.Done():
	case <-c.ctx.Done():
		return launch.Verdict{Result: launch.Result{ExitCode: launch.ExitFailed, Err: errClosed}}
	}
	t := time.NewTimer(farewells)
	defer t.Stop()
	select {
	case v := <-c.verdicts:
		return v
	case <-t.C:
		return launch.Verdict{Result: launch.Result{ExitCode: launch.ExitFailed,
			Err: cmp.Or(e.Err, context.Cause(ctx))}}
	}
}

// Close leaves the job with the exit status that this agent ends with. The others are told.
func (c *Cohort) Close(status int) error { return c.Leave(status, "") }

// Leave does what Close does, and gives the others a reason to tell their users; "": none.
func (c *Cohort) Leave(status int, why string) error {
	var err error
	c.close.Do(func() {
		c.calls.put(func() { c.machine.close(status, why) })
		t := time.NewTimer(farewells)
		select {
		case <-c.left:
		case <-t.C:
		}
		t.Stop()
		err = c.shut()
	})
	return err
}

// shut ends all goroutines. Frames in the queues of the others still go out, if they take them.
func (c *Cohort) shut() error {
	c.cancel()
	err := c.door.Close()
	ended := make(chan struct{})
	go func() { // ends with the goroutines, or with the process
		c.group.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(farewells):
		err = cmp.Or(err, fmt.Errorf("this agent left the job while Prepare or a connection still hung after %v: "+
			"see whether the disks answer", farewells))
	}
	if c.disco != nil {
		err = cmp.Or(err, c.disco.Close())
	}
	return err
}
