package key

import (
	"context"
	"crypto/rand"
	"errors"

	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// realm is what the daemons of munge on all nodes are together: it knows every credential.
type realm struct {
	mu    sync.Mutex
	creds map[string]credential
}

type credential struct {
	payload string
	uid     int
	used    bool
}

// user is an Authenticator of one user, whose credentials the others of its realm can check.
type user struct {
	*realm
	uid int
}

func newRealm() *realm { return &realm{creds: map[string]credential{}} }

// me is a user who is the one that runs the test.
func (r *realm) me() user { return user{r, os.Geteuid()} }

func (u user) Vouch(_ context.Context, payload []byte) ([]byte, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	name := "MUNGE:" + rand.Text() + ":"
	u.creds[name] = credential{payload: string(payload), uid: u.uid}
	return []byte(name), nil
}

func (u user) Open(_ context.Context, cred []byte) ([]byte, int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	c, ok := u.creds[string(cred)]
	switch {
	case !ok:
		return nil, 0, errors.New("invalid credential")
	case c.used:
		return nil, 0, errors.New("replayed credential")
	}
	c.used = true
	u.creds[string(cred)] = c
	return []byte(c.payload), c.uid, nil
}

// serving is a server on this host, and its address.
func serving(t *testing.T, job string, auth Authenticator, refused func(error)) (k Key, address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	k = New()
	s := Serve(l, k, job, auth, refused)
	t.Cleanup(func() { s.Close() })
	return k, l.Addr().String()
}

// dial connects to a server.
func dial(t *testing.T, address string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(time.Minute))
	t.Cleanup(func() { c.Close() })
	return c
}
