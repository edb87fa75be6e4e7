package key

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
)

func TestAllGetTheKey(t *testing.T) {
	r := newRealm()
	want, address := serving(t, "slurm:7.0:0", r.me(), func(err error) { t.Error(err) })
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if got, err := Ask(t.Context(), address, "slurm:7.0:0", r.me()); err != nil || got != want {
				t.Errorf("key differs: %v, %v", got != want, err)
			}
		})
	}
	wg.Wait()
}

// told collects what a server or a client says of a refusal.
type told chan string

func (c told) refused(err error) {
	select {
	case c <- err.Error():
	default:
	}
}

func TestOthersAreRefused(t *testing.T) {
	r := newRealm()
	me := r.me()
	for _, c := range []struct {
		name         string
		giver, asker Authenticator
		job          string
		giverSays    string
		askerSays    string
	}{
		{"another user asks", me, user{r, me.uid + 1}, "job", "of user", "closed the connection"},
		{"another realm asks", me, newRealm().me(), "job", "invalid credential", "closed the connection"},
		{"another job asks", me, me, "other", "of another job", "closed the connection"},
		{"no daemon", silent{}, me, "job", "no daemon", "closed the connection"},
		{"another user gives", impostor{user{r, me.uid + 1}, me.uid}, me, "job", "", "of user"},
	} {
		says := make(told, 1)
		_, address := serving(t, "job", c.giver, says.refused)
		_, err := askOnce(t.Context(), address, c.job, c.asker)
		if err == nil || !strings.Contains(err.Error(), c.askerSays) {
			t.Errorf("%s: asker says %v, want %q", c.name, err, c.askerSays)
		}
		if c.giverSays != "" {
			if got := <-says; !strings.Contains(got, c.giverSays) {
				t.Errorf("%s: giver says %s, want %q", c.name, got, c.giverSays)
			}
		}
	}
}

// impostor takes everybody for a user of this host, and cannot make credentials of theirs.
type impostor struct {
	user
	as int
}

func (i impostor) Open(ctx context.Context, cred []byte) ([]byte, int, error) {
	payload, _, err := i.user.Open(ctx, cred)
	return payload, i.as, err
}

// silent is a munge without its daemon.
type silent struct{}

func (silent) Vouch(context.Context, []byte) ([]byte, error) { return nil, errors.New("no daemon") }
func (silent) Open(context.Context, []byte) ([]byte, int, error) {
	return nil, 0, errors.New("no daemon")
}

// Who is between two agents changes what they send in one place each time.
func TestNobodyIsBetween(t *testing.T) {
	r := newRealm()
	_, address := serving(t, "job", r.me(), nil)
	for name, change := range map[string]struct{ ask, answer func(m *message) }{
		"the asker's public key":  {ask: func(m *message) { m.public = other(t) }},
		"the asker's credential":  {ask: func(m *message) { m.credential = []byte("MUNGE:x:") }},
		"the giver's public key":  {answer: func(m *message) { m.public = other(t) }},
		"the sealed key":          {answer: func(m *message) { m.sealed[0] ^= 1 }},
		"the giver's credential":  {answer: func(m *message) { m.credential = []byte("MUNGE:x:") }},
		"an answer of one's own":  {answer: func(m *message) { *m, _ = give(t.Context(), user{r, -1}, "job", New(), m.public) }},
		"a public key of nothing": {answer: func(m *message) { m.public = make([]byte, publicSize) }},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go between(l, address, change.ask, change.answer)
		if k, err := askOnce(t.Context(), l.Addr().String(), "job", r.me()); err == nil {
			t.Errorf("%s was changed, and a key came: zero %v", name, k == Key{})
		}
		l.Close()
	}
}

// between passes one exchange on, and changes it.
func between(l net.Listener, address string, ask, answer func(m *message)) {
	c, err := l.Accept()
	if err != nil {
		return
	}
	defer c.Close()
	up, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer up.Close()
	for _, way := range []struct {
		from, to net.Conn
		sealed   int
		change   func(m *message)
	}{{c, up, 0, ask}, {up, c, sealedSize, answer}} {
		m, err := readMessage(way.from, way.sealed)
		if err != nil {
			return
		}
		if way.change != nil {
			way.change(&m)
		}
		m.write(way.to)
	}
}

func other(t *testing.T) []byte {
	pair, err := newPair()
	if err != nil {
		t.Fatal(err)
	}
	return pair.PublicKey().Bytes()
}

// A first message that somebody recorded gets no answer again.
func TestRecordedMessage(t *testing.T) {
	r := newRealm()
	says := make(told, 1)
	_, address := serving(t, "job", r.me(), says.refused)
	m := message{public: other(t)}
	m.credential, _ = r.me().Vouch(t.Context(), asked("job", m.public))
	c := dial(t, address)
	m.write(c)
	if _, err := readMessage(c, sealedSize); err != nil {
		t.Fatal(err)
	}
	c = dial(t, address)
	m.write(c)
	if rest, err := io.ReadAll(c); err != nil || len(rest) > 0 {
		t.Errorf("%d bytes, %v", len(rest), err)
	}
	if got := <-says; !strings.Contains(got, "replayed") {
		t.Error(got)
	}
}

// A job that nobody serves ends with the caller's patience, and says what to look at.
func TestNobodyAnswers(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Ask(ctx, l.Addr().String(), "job", newRealm().me()); err == nil || !strings.Contains(err.Error(), l.Addr().String()) || !strings.Contains(err.Error(), "CPRUN_KEY_FILE") {
		t.Error(err)
	}
}

func FuzzMessage(f *testing.F) {
	var b bytes.Buffer
	message{public: make([]byte, publicSize), credential: []byte("MUNGE:x:")}.write(&b)
	f.Add(b.Bytes(), false)
	b.Reset()
	message{public: make([]byte, publicSize), sealed: make([]byte, sealedSize), credential: []byte("MUNGE:x:")}.write(&b)
	f.Add(b.Bytes(), true)
	f.Fuzz(func(t *testing.T, data []byte, second bool) {
		sealed := 0
		if second {
			sealed = sealedSize
		}
		in := bytes.NewReader(data)
		m, err := readMessage(in, sealed)
		if err != nil {
			return
		}
		var out bytes.Buffer
		m.write(&out)
		if want := data[:len(data)-in.Len()]; !bytes.Equal(out.Bytes(), want) {
			t.Fatalf("%x was read, and is written as %x", want, out.Bytes())
		}
	})
}
