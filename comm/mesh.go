package comm

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/tensor"
)

const (
	maxRanks  = 1 << 16
	minSecret = 16

	// maxStrangers bounds the connections that have not proved themselves.
	maxStrangers = 128
)

// Mesh says who takes part in a world of processes.
type Mesh struct {
	Rank, Size int
	// Secret is the job's own, random and at least 16 bytes long, the same on all ranks.
	// Who has it can join the job.
	Secret []byte
	// RunID tells apart runs that share a secret, such as the attempts of one job.
	RunID string
	// Name goes into errors behind the rank: "pid 4711 on node-a". By default it is the
	// process id.
	Name string

	// Dir is where the sockets of a Unix mesh lie. It must belong to this user, with
	// mode 0700.
	Dir string

	// Listener is where the higher ranks reach this one in a TCP mesh. The mesh takes it
	// over and closes it when all ranks are there.
	Listener net.Listener
	// Addrs are the listeners' addresses, "host:port", by rank.
	Addrs []string
}

func (m *Mesh) check() error {
	var faults []error
	if m.Size < 1 || m.Size > maxRanks || m.Rank < 0 || m.Rank >= m.Size {
		faults = append(faults, fmt.Errorf("rank %d of %d: a rank is from 0 to below the size, at most %d", m.Rank, m.Size, maxRanks))
	}
	if len(m.Secret) < minSecret {
		faults = append(faults, fmt.Errorf("secret of %d bytes: it needs at least %d, from crypto/rand", len(m.Secret), minSecret))
	}
	if len(m.Name) > maxName {
		faults = append(faults, fmt.Errorf("name of %d bytes: it may have %d", len(m.Name), maxName))
	}
	return errors.Join(faults...)
}

func (m *Mesh) identity(sealed bool) *identity {
	name := m.Name
	if name == "" {
		name = fmt.Sprintf("pid %d", os.Getpid())
	}
	return &identity{
		rank: m.Rank, size: m.Size, run: sha256.Sum256([]byte(m.RunID)), name: name,
		secret: m.Secret, sealed: sealed,
	}
}

// dialer reaches a rank, which may not listen yet.
type dialer func(ctx context.Context, rank int) (net.Conn, error)

// mesher connects one rank to all others: it dials the lower ranks and accepts the higher.
type mesher struct {
	*identity
	s    *sockets
	dial dialer
	opts Options
	wg   sync.WaitGroup

	mu   sync.Mutex
	last map[int]error // guarded by mu; why a rank could not be reached, most recently
}

// connect returns when the mesh is complete, or says who did not come. It closes ln.
func connect(ctx context.Context, id *identity, ln net.Listener, dial dialer, compute tensor.Stream, opts Options) (*Group, error) {
	opts = opts.withDefaults()
	ctx, cancel := context.WithTimeout(ctx, opts.Connect)
	m := &mesher{identity: id, s: newSockets(id.rank, id.size, id.name), dial: dial, opts: opts, last: map[int]error{}}
	if ln != nil {
		m.wg.Go(func() { m.acceptAll(ctx, ln) })
	}
	for r := range id.rank {
		m.wg.Go(func() { m.reach(ctx, r) })
	}
	var err error
	select {
	case <-m.s.complete:
	case <-m.s.dead:
		err = m.s.err()
	case <-ctx.Done():
		err = m.absence(ctx)
	}
	cancel()
	if ln != nil {
		ln.Close()
	}
	m.wg.Wait()
	if err != nil {
		m.s.fail(err)
		m.s.close()
		return nil, fmt.Errorf("connect rank %d of %d: %w", id.rank, id.size, err)
	}
	ranks := make([]int, id.size)
	for r := range ranks {
		ranks[r] = r
	}
	return newGroup(m.s, worldID, ranks, id.rank, compute, opts), nil
}

// absence names the ranks that did not come.
func (m *mesher) absence(ctx context.Context) error {
	missing := m.s.missing()
	if len(missing) == 0 || !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return context.Cause(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	names, why := make([]string, len(missing)), ""
	for i, r := range missing {
		names[i] = fmt.Sprint(r)
		if err := m.last[r]; err != nil && why == "" {
			why = fmt.Sprintf(" (rank %d: %v)", r, err)
		}
	}
	word := "rank "
	if len(names) > 1 {
		word = "ranks "
	}
	return &PeerError{
		Rank: missing[0], Name: word + strings.Join(names, ", "), Op: "connect",
		Cause: &notedError{fmt.Sprintf("did not come within %v%s", m.opts.Connect, why), ErrDeadline},
	}
}

// reach dials a rank until it is there.
func (m *mesher) reach(ctx context.Context, rank int) {
	pause := 2 * time.Millisecond
	for {
		conn, err := m.dial(ctx, rank)
		if err == nil {
			if err = m.meet(ctx, conn, func() (*peer, error) { return m.identity.dial(conn, rank) }); err == nil {
				return
			}
			err = fmt.Errorf("handshake: %w", err)
		}
		m.mu.Lock()
		if ctx.Err() == nil {
			m.last[rank] = err
		}
		m.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, 100*time.Millisecond)
	}
}

// acceptAll takes connections until ln is closed. Whoever does not prove to be a rank that is
// still to come is sent away, and harms nobody.
func (m *mesher) acceptAll(ctx context.Context, ln net.Listener) {
	strangers := make(chan struct{}, maxStrangers)
	for {
		conn, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			m.opts.Log("rank %d: accept: %v", m.rank, err)
			time.Sleep(10 * time.Millisecond) // out of descriptors, most likely
			continue
		}
		select {
		case strangers <- struct{}{}:
		default:
			m.opts.Log("rank %d: refused a connection: %d others have not proved themselves", m.rank, maxStrangers)
			conn.Close()
			continue
		}
		m.wg.Go(func() {
			defer func() { <-strangers }()
			m.welcome(ctx, conn)
		})
	}
}

func (m *mesher) welcome(ctx context.Context, conn net.Conn) {
	held := -1
	err := m.meet(ctx, conn, func() (*peer, error) {
		return m.identity.accept(conn, func(rank int) bool {
			if !m.s.reserve(rank) {
				return false
			}
			held = rank
			return true
		})
	})
	if err != nil {
		if held >= 0 {
			m.s.release(held)
		}
		if ctx.Err() == nil {
			m.opts.Log("rank %d: refused a connection: %v", m.rank, err)
		}
	}
}

// meet runs a handshake within its bound and attaches the peer.
func (m *mesher) meet(ctx context.Context, conn net.Conn, shake func() (*peer, error)) error {
	conn.SetDeadline(time.Now().Add(min(handshakeBound, m.opts.Connect)))
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now()) })
	p, err := shake()
	if err == nil && !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		stop()
		conn.Close()
		return err
	}
	conn.SetDeadline(time.Time{})
	p.s = m.s
	m.opts.Log("rank %d: connected to rank %d (%s)", m.rank, p.rank, p.name)
	m.s.attach(p)
	return nil
}
