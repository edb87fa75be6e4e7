package key

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
)

// Times and bounds of a server.
const (
	hearTime  = 3 * time.Second  // for the first message of a connection
	serveTime = 10 * time.Second // for all of it
	maxChecks = 4                // credentials that are checked at the same time: each may be a process
	tellEvery = time.Second      // between two refusals that are told
)

// Server hands the key of a job to the agents that ask for it.
type Server struct {
	listener net.Listener
	key      Key
	job      string
	auth     Authenticator
	refused  *teller

	ctx    context.Context
	cancel context.CancelFunc
	conns  slots
	checks chan struct{} // holds a token for each check in progress
	done   sync.WaitGroup
}

// Serve begins to hand out a key at a listener, which it takes over. It calls refused, where that is not
// nil, with why somebody did not get the key: at most once a second, whoever knocks.
func Serve(l net.Listener, k Key, job string, auth Authenticator, refused func(error)) *Server {
	s := &Server{listener: l, key: k, job: job, auth: auth, refused: &teller{f: refused}, checks: make(chan struct{}, maxChecks)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.done.Go(s.accept)
	return s
}

// Close ends all connections, and returns when nothing of the server is left.
func (s *Server) Close() error {
	s.cancel()
	err := s.listener.Close()
	s.conns.closeAll()
	s.done.Wait()
	return err
}

func (s *Server) accept() {
	for {
		c, err := s.listener.Accept()
		switch {
		case s.ctx.Err() != nil:
			if err == nil {
				c.Close()
			}
			return
		case err != nil: // descriptors run out, and come back
			s.refused.tell(err)
			select {
			case <-time.After(50 * time.Millisecond):
			case <-s.ctx.Done():
				return
			}
			continue
		}
		n := s.conns.add(c)
		if n == nil {
			c.Close()
			continue
		}
		s.done.Go(func() {
			defer s.conns.remove(n)
			if err := s.answer(n); err != nil && s.ctx.Err() == nil {
				s.refused.tell(fmt.Errorf("%s asked for the key of the job and did not get it: %w", c.RemoteAddr(), err))
			}
		})
	}
}

// answer serves one connection.
func (s *Server) answer(n *slot) error {
	begin := time.Now()
	n.conn.SetDeadline(begin.Add(hearTime))
	m, err := readMessage(n.conn, 0)
	if err != nil {
		return err
	}
	s.conns.hear(n)
	n.conn.SetDeadline(begin.Add(serveTime))
	ctx, cancel := context.WithDeadline(s.ctx, begin.Add(serveTime))
	defer cancel()
	select {
	case s.checks <- struct{}{}:
		defer func() { <-s.checks }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := verify(ctx, s.auth, os.Geteuid(), m.credential, asked(s.job, m.public)); err != nil {
		return err
	}
	answer, err := give(ctx, s.auth, s.job, s.key, m.public)
	if err != nil {
		return err
	}
	return answer.write(n.conn)
}

// teller tells of refusals: at most once in a while, since anybody can knock.
type teller struct {
	f    func(error) // nil: nobody is told
	mu   sync.Mutex
	last time.Time
}

func (t *teller) tell(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now := time.Now(); t.f != nil && now.Sub(t.last) >= tellEvery {
		t.last = now
		t.f(err)
	}
}
