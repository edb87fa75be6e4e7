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
	tickInterval = 200 * time.Millisecond
	// farewells bounds the waits of Close: for the others to hear of it, and for goroutines to end.
	closeTimeout = 3 * confirmTime
)

// Cohort is this agent's part in the job. It implements launch.Cohort.
type Membership struct {
	cfg        Config
	self       Member
	wireConfig wire.Config // of connections that come in
	acceptor   *wire.Acceptor
	discovery  Discovery

	ctx    context.Context // of all goroutines
	cancel context.CancelFunc
	group  sync.WaitGroup

	events chan func() // from connections; loop runs them
	calls  mailbox     // from callers, who do not wait

	coord    *coordinator          // loop's
	links    map[string]*wire.Link // loop's, as linked
	linkedAt map[string]time.Time  // since when each is there
	frame    wire.Frame            // loop's: of sending
	sending  *message              // loop's

	helloFrame atomic.Pointer[[]byte]
	dialing    sync.Map // addresses that are being connected to

	next        chan nextResult // room for one
	verdicts    chan launch.Verdict
	newsChan    atomic.Pointer[chan launch.News]
	goodbyeSent chan struct{}
	leaveOnce   sync.Once
	closeOnce   sync.Once
}

// A next holds the results of Next.
type nextResult struct {
	decision *decision
	err      error
}

// Join begins to look for the other agents of the job, and returns at once; Next waits for them. Call Close
// at the end.
func Join(ctx context.Context, cfg Config) (*Membership, error) {
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
	c := &Membership{
		cfg: cfg, events: make(chan func()), links: map[string]*wire.Link{}, linkedAt: map[string]time.Time{},
		next: make(chan nextResult, 1), verdicts: make(chan launch.Verdict, 1), goodbyeSent: make(chan struct{}),
		self: Member{
			Name: id.Name(cfg.Host), Host: cfg.Host, HostID: cfg.HostID, NodeRank: cfg.NodeRank, NProc: cfg.NProc,
			Addr: ln.Addr().String(),
		},
	}
	c.calls.init()
	c.wireConfig = wire.Config{
		Identity: id, Job: cfg.Job, Key: cfg.Key, Silence: cfg.Silence,
		Hello: func() []byte { return *c.helloFrame.Load() }, Check: c.checkInbound,
	}
	c.ctx, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if cfg.Discovery != nil {
		if c.discovery, err = cfg.Discovery(PeerAddr{c.self.Name, c.self.Addr}); err != nil {
			ln.Close()
			c.cancel()
			return nil, err
		}
	}
	c.coord = newCoordinator(&c.cfg, c.self, c, time.Now())
	c.coord.atRendezvous = cfg.Meets && first
	c.renewHello()
	c.acceptor = wire.Open(ln, &c.wireConfig, func(l *wire.Link) { c.admit(l, "") }, c.onRefused)
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
func (m *Membership) loop() {
	tick := time.NewTicker(tickInterval)
	defer tick.Stop()
	defer func() {
		for _, l := range m.links {
			l.Close()
		}
	}()
	var changed <-chan struct{}
	if m.discovery != nil {
		changed = m.discovery.Changed()
		m.coord.onHints(m.discovery.Peers())
	}
	for {
		select {
		case f := <-m.events:
			m.step(f)
		case <-m.calls.ready:
			for _, f := range m.calls.take() {
				m.step(f)
			}
		case <-tick.C:
			m.step(m.coord.tick)
		case <-changed:
			m.step(func() { m.coord.onHints(m.discovery.Peers()) })
		case <-m.ctx.Done():
			return
		}
	}
}

func (m *Membership) step(f func()) {
	m.coord.now = time.Now()
	f()
	m.renewHello()
}

// Next waits until the agents agree on the next start of all workers, or on the end of the job.
func (m *Membership) Next(ctx context.Context) (launch.Start, error) {
	select {
	case <-m.next: // of a call that was given up
	default:
	}
	m.calls.put(func() { m.coord.next() })
	select {
	case n := <-m.next:
		if n.err != nil {
			return launch.Start{}, n.err
		}
		return m.startFor(n.decision), nil
	case <-ctx.Done():
		m.calls.put(func() { m.coord.caller.waiting = false })
		return launch.Start{}, context.Cause(ctx)
	case <-m.ctx.Done():
		return launch.Start{}, errClosed
	}
}

// begun returns the start of d on this agent.
func (m *Membership) startFor(d *decision) launch.Start {
	w := &d.Assignment
	me := w.Members[w.index(m.self.Name)]
	s := launch.Start{
		Number: w.Restart, Secret: d.Secret, Payload: d.Payload,
		Ranks: launch.RankRange{NodeRank: me.NodeRank, FirstRank: me.FirstRank, WorldSize: w.Size},
	}
	if len(w.Members) > 1 {
		s.Listen = m.cfg.Listen
		for _, a := range w.Members {
			s.Hosts = append(s.Hosts, slices.Repeat([]string{a.HostID}, a.NProc)...)
		}
	}
	return s
}

// News returns the channel of the other agents' news of the present start.
func (m *Membership) News() <-chan launch.News {
	if ch := m.newsChan.Load(); ch != nil {
		return *ch
	}
	return nil
}

// Say tells the other agents something about the present start.
func (m *Membership) Publish(n launch.News) { m.calls.put(func() { m.coord.publish(n) }) }

// End tells how the start has ended here, and returns how it ended for the job. If ctx has ended, it
// waits for the others a moment only.
func (m *Membership) End(ctx context.Context, e launch.Ending) launch.Verdict {
	select {
	case <-m.verdicts:
	default:
	}
	m.calls.put(func() { m.coord.onLocalEnd(e) })
	select {
	case v := <-m.verdicts:
		return v
	case <-ctx.Done():
	case <-m.ctx.Done():
		return launch.Verdict{Result: launch.Result{ExitCode: launch.ExitFailed, Err: errClosed}}
	}
	t := time.NewTimer(closeTimeout)
	defer t.Stop()
	select {
	case v := <-m.verdicts:
		return v
	case <-t.C:
		return launch.Verdict{Result: launch.Result{ExitCode: launch.ExitFailed,
			Err: cmp.Or(e.Err, context.Cause(ctx))}}
	}
}

// Close leaves the job with the exit status that this agent ends with. The others are told.
func (m *Membership) Close(status int) error { return m.Leave(status, "") }

// Leave does what Close does, and gives the others a reason to tell their users; "": none.
func (m *Membership) Leave(status int, why string) error {
	var err error
	m.closeOnce.Do(func() {
		m.calls.put(func() { m.coord.close(status, why) })
		t := time.NewTimer(closeTimeout)
		select {
		case <-m.goodbyeSent:
		case <-t.C:
		}
		t.Stop()
		err = m.shut()
	})
	return err
}

// shut ends all goroutines. Frames in the queues of the others still go out, if they take them.
func (m *Membership) shut() error {
	m.cancel()
	err := m.acceptor.Close()
	ended := make(chan struct{})
	go func() { // ends with the goroutines, or with the process
		m.group.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(closeTimeout):
		err = cmp.Or(err, fmt.Errorf("this agent left the job while Prepare or a connection still hung after %v: "+
			"see whether the disks answer", closeTimeout))
	}
	if m.discovery != nil {
		err = cmp.Or(err, m.discovery.Close())
	}
	return err
}
