package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/gossip"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
)

const (
	// tickInterval separates two checks of the coordinator's timeouts.
	tickInterval = 200 * time.Millisecond
	// closeTimeout bounds two waits of Close: for the peers to learn of the end, and for goroutines to end.
	closeTimeout = 3 * endTime
	// portTries bounds the search for a port that is free for both TCP and UDP.
	portTries = 16
	// nameDigits is the length of the random part of an agent's name: 80 bits.
	nameDigits = 16
)

// Membership is this agent's part in the job. It implements launch.Membership.
type Membership struct {
	cfg        Config
	self       Member
	wireConfig wire.Config
	acceptor   *wire.Acceptor
	gossip     *gossip.Members

	ctx    context.Context // of all goroutines
	cancel context.CancelFunc
	group  sync.WaitGroup

	events chan func() // from connections, for loop
	calls  mailbox     // from callers, who do not wait

	coord    *coordinator          // used by loop alone
	links    map[string]*wire.Link // used by loop alone, as linkedAt
	linkedAt map[string]time.Time  // when each connection came up
	absent   bool                  // another process used cfg.Port; used by loop alone
	frame    wire.Frame            // of sending; used by loop alone
	sending  *message              // the last sent message; used by loop alone

	helloFrame atomic.Pointer[[]byte]
	dialing    sync.Map // addresses with a dial in progress

	next        chan nextResult // capacity 1
	verdicts    chan launch.Verdict
	newsChan    atomic.Pointer[chan launch.News]
	goodbyeSent chan struct{}
	leaveOnce   sync.Once
	closeOnce   sync.Once
}

type nextResult struct {
	decision *decision
	err      error
}

// Join starts to look for the job's other agents and returns at once. Next waits for them. Call Leave or Close at the
// end.
func Join(ctx context.Context, cfg Config) (*Membership, error) {
	if err := cfg.resolve(); err != nil {
		return nil, err
	}
	id, err := wire.NewIdentity(cfg.Key)
	if err != nil {
		return nil, err
	}
	ln, packets, rendezvous, err := listen(&cfg)
	if err != nil {
		return nil, err
	}
	m := &Membership{
		cfg: cfg, events: make(chan func()), links: map[string]*wire.Link{}, linkedAt: map[string]time.Time{},
		next: make(chan nextResult, 1), verdicts: make(chan launch.Verdict, 1), goodbyeSent: make(chan struct{}),
		self: Member{
			Name: cfg.Host + "-" + rand.Text()[:nameDigits], Host: cfg.Host, HostID: cfg.HostID,
			NodeRank: cfg.NodeRank, NProc: cfg.NProc, Addr: ln.Addr().String(),
		},
	}
	m.calls.ready = make(chan struct{}, 1)
	m.wireConfig = wire.Config{
		Identity: id, Job: cfg.Job, Silence: cfg.Silence,
		Hello: func() []byte { return *m.helloFrame.Load() }, Check: m.check,
	}
	m.ctx, m.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if m.gossip, err = gossip.Join(gossip.Config{
		Job: cfg.Job, Key: cfg.Key, Name: m.self.Name, Packets: packets, Dial: m.dialGossip,
	}); err != nil {
		ln.Close()
		m.cancel()
		return nil, err
	}
	m.coord = newCoordinator(&m.cfg, m.self, m, time.Now())
	m.coord.atRendezvous, m.absent = cfg.Meets && rendezvous, cfg.Port != 0 && !rendezvous
	m.renewHello()
	m.acceptor = m.accept(ln)
	m.group.Go(m.loop)
	return m, nil
}

// listen opens the ports of this agent, TCP and UDP of one number. rendezvous reports whether it is the port of the
// rendezvous.
func listen(cfg *Config) (ln net.Listener, packets net.PacketConn, rendezvous bool, err error) {
	if cfg.Port != 0 {
		if ln, packets, err = cfg.listen(cfg.Port); err == nil {
			return ln, packets, true, nil
		}
	}
	for range portTries {
		if ln, packets, err = cfg.listen(0); err == nil {
			return ln, packets, false, nil
		}
	}
	return nil, nil, false, fmt.Errorf("control connections of the job's nodes: %w", err)
}

func (c *Config) listen(port int) (net.Listener, net.PacketConn, error) {
	ln, err := c.Network.Listen(net.JoinHostPort(c.Listen, strconv.Itoa(port)))
	if err != nil {
		return nil, nil, err
	}
	packets, err := c.Network.ListenPacket(ln.Addr().String())
	if err != nil {
		ln.Close()
	}
	return ln, packets, err
}

// loop owns the coordinator.
func (m *Membership) loop() {
	tick := time.NewTicker(tickInterval)
	defer tick.Stop()
	defer func() {
		for _, l := range m.links {
			l.Close()
		}
	}()
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
		case <-m.gossip.Changed():
			m.step(func() { m.coord.search.hints = m.gossip.Peers() })
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
	case <-m.next: // of an abandoned call
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

// startFor returns this agent's part of a start.
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

// News returns the channel with news of the current start from the other agents.
func (m *Membership) News() <-chan launch.News {
	if ch := m.newsChan.Load(); ch != nil {
		return *ch
	}
	return nil
}

// Publish sends news of the current start to the other agents.
func (m *Membership) Publish(n launch.News) { m.calls.put(func() { m.coord.publish(n) }) }

// End reports how the start ended here, and returns the job's verdict. If ctx has ended, it waits at most closeTimeout.
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
	select {
	case v := <-m.verdicts:
		return v
	case <-time.After(closeTimeout):
		return launch.Verdict{Result: launch.Result{ExitCode: launch.ExitFailed,
			Err: cmp.Or(e.Err, context.Cause(ctx))}}
	}
}

// Close leaves the job with this agent's exit status. The other agents print the reason why; "": none.
func (m *Membership) Close(status int, why string) error {
	var err error
	m.closeOnce.Do(func() {
		m.calls.put(func() { m.coord.close(status, why) })
		select {
		case <-m.goodbyeSent:
		case <-time.After(closeTimeout):
		}
		err = m.shut()
	})
	return err
}

// shut ends all goroutines. Queued frames are still sent if the peers accept them.
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
		err = cmp.Or(err, fmt.Errorf("this agent left the job, but Prepare or a connection still hung after %v: "+
			"check the disks of this host", closeTimeout))
	}
	return cmp.Or(err, m.gossip.Close())
}
