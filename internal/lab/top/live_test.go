package top

import (
	"bytes"
	"context"
	"io"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gdamore/tcell/v3"

	"github.com/cprun/cprun/internal/base/must"
)

// A fakeTTY is a terminal in memory.
type fakeTTY struct {
	mu      sync.Mutex
	size    tcell.WindowSize
	out     bytes.Buffer
	started bool // the terminal is not restored
	resized chan<- bool

	keys chan []byte
	gone chan struct{} // closed to end the reader
}

func newTTY(w, h int) *fakeTTY {
	return &fakeTTY{size: tcell.WindowSize{Width: w, Height: h}, keys: make(chan []byte, 8)}
}

func (f *fakeTTY) Start() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.started, f.gone = true, make(chan struct{})
	return nil
}

func (f *fakeTTY) Stop() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.started = false
	return nil
}

func (f *fakeTTY) Drain() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.gone)
	return nil
}

func (f *fakeTTY) NotifyResize(c chan<- bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resized = c
}

func (f *fakeTTY) WindowSize() (tcell.WindowSize, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.size, nil
}

func (f *fakeTTY) Read(p []byte) (int, error) {
	select {
	case b := <-f.keys:
		return copy(p, b), nil
	case <-f.gone:
		return 0, io.EOF
	}
}

func (f *fakeTTY) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.out.Write(p)
}

func (f *fakeTTY) Close() error { return nil }

// said returns the output since the last call.
func (f *fakeTTY) said() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.out.Reset()
	return f.out.String()
}

// resize changes the window size.
func (f *fakeTTY) resize(w, h int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.size = tcell.WindowSize{Width: w, Height: h}
	f.resized <- true
}

// newScreen returns a screen on a fake terminal.
func newScreen(t *testing.T) (*fakeTTY, tcell.Screen) {
	t.Helper()
	tty := newTTY(80, 24)
	screen := must.Have(tcell.NewTerminfoScreenFromTty(tty, tcell.OptNegotiation(false),
		tcell.OptKeyboardProtocol(tcell.LegacyKeyboard)))
	return tty, screen
}

// liveOn runs Live on a fake terminal.
func liveOn(t *testing.T, ctx context.Context, s *Source, signals chan os.Signal) (*fakeTTY, <-chan error) {
	t.Helper()
	tty, screen := newScreen(t)
	done := make(chan error, 1)
	go func() { done <- Live(ctx, s, screen, signals) }()
	return tty, done
}

// quit ends Live by a key.
func quit(t *testing.T, tty *fakeTTY, done <-chan error) {
	t.Helper()
	tty.keys <- []byte("q")
	must.Do(t, <-done)
}

// until waits for output.
func until(t *testing.T, tty *fakeTTY, want string) (all string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if all += tty.said(); strings.Contains(all, want) {
			return all
		}
	}
	t.Fatalf("no %q in %q", want, all)
	return ""
}

// However Live ends, it restores the terminal, and no goroutine stays.
func TestLiveEnds(t *testing.T) {
	for name, end := range map[string]func(*fakeTTY, chan os.Signal, context.CancelFunc){
		"q":      func(f *fakeTTY, _ chan os.Signal, _ context.CancelFunc) { f.keys <- []byte("q") },
		"Ctrl-C": func(f *fakeTTY, _ chan os.Signal, _ context.CancelFunc) { f.keys <- []byte{3} },
		"signal": func(_ *fakeTTY, s chan os.Signal, _ context.CancelFunc) { s <- syscall.SIGTERM },
		"ctx":    func(_ *fakeTTY, _ chan os.Signal, cancel context.CancelFunc) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			signals := make(chan os.Signal, 1)
			tty, done := liveOn(t, ctx, example(t).source(), signals)
			until(t, tty, "opticks-20261122")
			end(tty, signals, cancel)
			if err := <-done; err != nil {
				t.Error(err)
			}
			if tty.started || !strings.Contains(tty.said(), "\x1b[?1049l") {
				t.Error("the terminal is not as it was")
			}
		})
	}
}

// A panic while reading the run becomes an error, and one while drawing stays a panic. Both restore the terminal.
func TestLiveLeavesTheTerminalAfterAPanic(t *testing.T) {
	t.Parallel()
	tty, done := liveOn(t, t.Context(), nil, nil)
	if err := <-done; err == nil || !strings.Contains(err.Error(), "panic") || tty.started {
		t.Errorf("%v; still drawing: %v", err, tty.started)
	}
	tty, screen := newScreen(t)
	func() {
		defer func() {
			if r := recover(); r != "while drawing" {
				t.Errorf("recovered %v", r)
			}
		}()
		Live(t.Context(), example(t).source(), panics{screen}, nil)
	}()
	if tty.started {
		t.Error("the terminal is not as it was")
	}
}

// A panics is a screen that panics when drawn on.
type panics struct{ tcell.Screen }

func (panics) Show() { panic("while drawing") }

// Only changed cells are sent: of a picture of 1,900 characters, a new clock time or hop costs a few.
func TestLiveSendsWhatHasChanged(t *testing.T) {
	t.Parallel()
	r := example(t)
	tty, done := liveOn(t, t.Context(), r.source(), nil)
	first := until(t, tty, "quit")
	time.Sleep(lookEvery) // a late size report draws the picture again
	tty.said()
	time.Sleep(lookEvery + lookEvery/2)
	if again := tty.said(); len(again) > len(first)/4 {
		t.Errorf("%d bytes at first, and then %d: %q", len(first), len(again), again)
	}
	quit(t, tty, done)
}

// The picture follows the size of the terminal, and keys scroll the ranks.
func TestLiveResizesAndScrolls(t *testing.T) {
	t.Parallel()
	r := example(t)
	tty, done := liveOn(t, t.Context(), r.source(), nil)
	until(t, tty, "page up")
	tty.resize(60, 20)
	until(t, tty, "q quit   up")
	tty.resize(200, 50)
	until(t, tty, "page up")
	tty.keys <- []byte("\x1b[B\x1b[A\x1b[6~\x1b[5~jk\x0c")
	until(t, tty, "page up") // Ctrl-L redraws everything
	quit(t, tty, done)
}

// Terminals without colours get none, and terminals without Unicode get only ASCII.
func TestLiveOnPlainTerminals(t *testing.T) {
	t.Setenv("NO_COLOR", "1")
	tty, done := liveOn(t, t.Context(), example(t).source(), nil)
	coloured := regexp.MustCompile(`\x1b\[([0-9;]*;)?([34][0-9]|[34]8;[0-9;]*|7)m`)
	if found := coloured.FindString(until(t, tty, "quit")); found != "" {
		t.Errorf("colours or reversed text: %q", found)
	}
	quit(t, tty, done)
	t.Setenv("LC_ALL", "C")
	tty, done = liveOn(t, t.Context(), example(t).source(), nil)
	if all := until(t, tty, "quit"); strings.IndexFunc(all, func(r rune) bool { return r > 0x7e }) >= 0 ||
		!strings.Contains(all, "####") {
		t.Errorf("no ASCII: %q", all)
	}
	quit(t, tty, done)
}
