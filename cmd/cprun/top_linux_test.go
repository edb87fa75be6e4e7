package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A pty is a terminal with a screen that a test can read.
type pty struct {
	*exec.Cmd
	t     *testing.T
	ctl   *os.File
	tty   *os.File
	out   lockedBuffer
	ended chan struct{} // closed when the reader ends
	was   unix.Termios
}

// onTerminal starts cprun on a new terminal.
func onTerminal(t *testing.T, w, h int, args ...string) *pty {
	t.Helper()
	ctl, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(ctl.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(ctl.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	p := &pty{Cmd: process(t, args...), t: t, ctl: ctl, tty: tty, ended: make(chan struct{})}
	p.resize(w, h)
	p.was = p.mode()
	p.Env = append(p.Env, "TERM=xterm-256color", "LC_ALL=C.UTF-8", "NO_COLOR=")
	p.Stdin, p.Stdout, p.Stderr = tty, tty, tty
	p.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { // ends when the terminal is closed
		defer close(p.ended)
		b := make([]byte, 1<<16)
		for {
			n, err := ctl.Read(b)
			p.out.Write(b[:n])
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		p.Process.Kill()
		tty.Close()
		ctl.Close()
		<-p.ended
	})
	return p
}

func (p *pty) mode() unix.Termios {
	p.t.Helper()
	m, err := unix.IoctlGetTermios(int(p.tty.Fd()), unix.TCGETS)
	if err != nil {
		p.t.Fatal(err)
	}
	return *m
}

func (p *pty) resize(w, h int) {
	p.t.Helper()
	if err := unix.IoctlSetWinsize(int(p.ctl.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(h),
		Col: uint16(w)}); err != nil {
		p.t.Fatal(err)
	}
}

// sent matches characters and commands to a terminal. Only cursor moves and clears matter here.
var sent = regexp.MustCompile(`\x1b\[(\d*);?(\d*)H|\x1b\[J|` +
	`\x1b(?:\[[0-9;?>=]*[a-zA-Z]|\][^\x1b]*\x1b\\|[()][A-Z0-9]|[=>])|[^\x1b\r\n]`)

// picture returns the screen of the terminal.
func (p *pty) picture() string {
	grid := map[[2]int]string{}
	row, col := 1, 1
	for _, m := range sent.FindAllStringSubmatch(p.out.String(), -1) {
		switch {
		case m[0] == "\x1b[J":
			clear(grid)
		case strings.HasSuffix(m[0], "H") && strings.HasPrefix(m[0], "\x1b["):
			row, col = 1, 1
			fmt.Sscan(m[1], &row)
			fmt.Sscan(m[2], &col)
		case m[0][0] != 0x1b:
			grid[[2]int{row, col}] = m[0]
			col++
		}
	}
	var b strings.Builder
	for r := range 60 {
		var line strings.Builder
		for c := range 200 {
			line.WriteString(cmp.Or(grid[[2]int{r + 1, c + 1}], " "))
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	return strings.TrimRight(b.String(), "\n")
}

// shows waits until the picture matches.
func (p *pty) shows(want string) {
	p.t.Helper()
	re := regexp.MustCompile(want)
	seen := -1
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if said := len(p.out.String()); said == seen {
			continue // unchanged
		} else if seen = said; re.MatchString(p.picture()) {
			return
		}
	}
	p.t.Fatalf("it does not show %q:\n%s", want, p.picture())
}

// ends waits for the exit status, and checks that the terminal is restored.
func (p *pty) ends(code int) {
	p.t.Helper()
	p.Wait()
	if got := p.ProcessState.ExitCode(); got != code {
		p.t.Errorf("exit status %d (%v), want %d", got, p.ProcessState, code)
	}
	for end := time.Now().Add(time.Minute); !strings.Contains(p.out.String(),
		"\x1b[?1049l"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatal("it does not leave the alternate screen")
		}
	}
	if p.mode() != p.was {
		p.t.Errorf("the terminal's mode is %+v, and was %+v", p.mode(), p.was)
	}
}

// cprun top shows a run while it trains, in other sizes, after its launcher is killed, and after a restart from its
// checkpoint.
func TestTopWatchesARun(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run")
	yaml := small(t, endless)
	s := start(t, dir, "--nproc", "2", "--set", "checkpoint.every=2", yaml)
	s.afterStep(3)
	p := onTerminal(t, 100, 40, "top", dir)
	p.shows(`^run  running (.*\n)+loss  (.*\n)+2 ranks\n(.*\n)   0 .* (forward|backward|optimizer|its own work)`)
	p.resize(60, 20)
	p.shows(`(?m)^q quit   up`)
	p.resize(200, 50)
	p.shows(`bytes  operation +waits for`)
	s.Process.Kill()
	s.Wait()
	p.shows(`^run  dead: `)
	if out, _ := must(t, "top", dir); !strings.Contains(out, "run  dead: ") || strings.ContainsAny(out, "\x1b\r") {
		t.Errorf("elsewhere:\n%s", out)
	}
	again := start(t, dir, "--nproc", "2", "--set", "checkpoint.every=2", yaml)
	p.shows(`^run  running `)
	again.stop()
	p.shows(`^run  stopped `)
	if _, err := p.ctl.WriteString("q"); err != nil {
		t.Fatal(err)
	}
	p.ends(0)
}

// SIGTERM and SIGHUP restore the terminal; --once prints lines on it.
func TestTopEndsOnSignals(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
		p := onTerminal(t, 80, 24, "top", dir)
		p.shows("  not started")
		if err := p.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		p.ends(0)
	}
	p := onTerminal(t, 80, 24, "top", "--once", dir)
	p.shows("  not started")
	if p.Wait(); strings.Contains(p.out.String(), "\x1b") {
		t.Errorf("--once: %q", p.out.String())
	}
}

func TestTopRefusesWhatIsNoDirectory(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"top"}, {"top", "none"}, {"top", os.Args[0]}, {"top", "a", "b"}} {
		c := process(t, args...)
		c.Dir = t.TempDir()
		if said, err := c.CombinedOutput(); c.ProcessState.ExitCode() != 2 || !bytes.Contains(said, []byte("cprun: ")) {
			t.Errorf("%v: %v\n%s", args, err, said)
		}
	}
}

// Without a name, top shows the newest run in runs/.
func TestTopFindsTheNewestRun(t *testing.T) {
	t.Parallel()
	work := t.TempDir()
	for i, name := range []string{"older", "newer", "oldest"} {
		file := write(t, filepath.Join(work, "runs", name), "config.yaml", "")
		when := time.Now().Add(-time.Duration([]int{2, 1, 3}[i]) * time.Hour)
		if err := os.Chtimes(file, when, when); err != nil {
			t.Fatal(err)
		}
	}
	c := process(t, "top")
	c.Dir = work
	if out, err := c.Output(); err != nil || !strings.HasPrefix(string(out), "newer  ") {
		t.Errorf("%v, %s", err, out)
	}
}
