package key

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/cprun/cprun/internal/terminal"
)

// Agents that are all on one host need no munge: the kernel says whose process is at the other end of a Unix
// socket. It has an abstract name, so that nothing lies in a directory afterwards.

// socketName is that of a job's socket. The user's number is in it, so that users do not meet by chance.
func socketName(job string) string {
	return fmt.Sprintf("@cprun-key-%d-%s", os.Geteuid(), digest([]byte(job))[:32])
}

// localServer hands the key to processes of this user.
type localServer struct {
	listener *net.UnixListener
	key      Key
	refused  *teller
	done     chan struct{}
}

// serveLocal makes a key, and begins to hand it out.
func serveLocal(job string, refused func(error)) (Key, io.Closer, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socketName(job), Net: "unix"})
	if err != nil {
		return Key{}, nil, fmt.Errorf("key of the job %s: %w; see whether a process of it is left on this host", terminal.Name(job), err)
	}
	s := &localServer{listener: l, key: New(), refused: &teller{f: refused}, done: make(chan struct{})}
	go s.accept()
	return s.key, s, nil
}

// Close returns when nothing of the server is left.
func (s *localServer) Close() error {
	err := s.listener.Close()
	<-s.done
	return err
}

// accept serves one connection after the other: it reads nothing, and what it writes has room in any socket.
func (s *localServer) accept() {
	defer close(s.done)
	for {
		c, err := s.listener.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // descriptors run out, and come back
			time.Sleep(50 * time.Millisecond)
			continue
		}
		c.SetDeadline(time.Now().Add(time.Second))
		if err = ofThisUser(c); err == nil {
			_, err = c.Write(s.key[:])
		}
		c.Close()
		if err != nil {
			s.refused.tell(fmt.Errorf("a process of this host asked for the key of the job and did not get it: %w", err))
		}
	}
}

// askLocal gets the key from the first agent on this host. It tries until ctx is done.
func askLocal(ctx context.Context, job string) (Key, error) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		k, err := askLocalOnce(ctx, job)
		if err == nil {
			return k, nil
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return Key{}, fmt.Errorf("key of the job %s from its first process on this host: %w; see whether that one runs, or %s", terminal.Name(job), err, Fix)
		}
	}
}

func askLocalOnce(ctx context.Context, job string) (k Key, err error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", socketName(job))
	if err != nil {
		return k, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(attemptTime))
	if err := ofThisUser(c.(*net.UnixConn)); err != nil {
		return k, err
	}
	_, err = io.ReadFull(c, k[:])
	return k, err
}
