package launch

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestOutput(t *testing.T) {
	r := play(t, "output", 2)
	if r.ExitCode != ExitDone {
		t.Fatalf("%+v", r.Result)
	}
	for rank := range 2 {
		path := filepath.Join(r.logs, fmt.Sprintf("rank-%04d.log", rank))
		log, err := os.ReadFile(path)
		want := fmt.Sprintf(
			"hello from rank %d\n%s\n\ufffd\ufffd\nno newline at the end",
			rank,
			strings.Repeat("x", maxLine+5),
		)
		if err != nil || string(log) != want {
			t.Errorf("log of rank %d has %d bytes, want %d; %v", rank, len(log), len(want), err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("mode of the log: %v, %v", info.Mode(), err)
		}
	}
	want := "[rank 0] hello from rank 0\n[rank 0] " + strings.Repeat(
		"x",
		maxLine,
	) + " [5 more bytes in the log]\n[rank 0] \ufffd\ufffd\n[rank 0] no newline at the end\n"
	if r.stderr != want {
		t.Errorf("stderr has %d bytes, want %d: %.100q", len(r.stderr), len(want), r.stderr)
	}
}

func TestShow(t *testing.T) {
	t.Parallel()
	r := play(t, "exit3", 2, func(j *Job) { j.Show = ShowAll })
	if strings.Count(r.stderr, "so long") != 1 {
		t.Errorf("a line that was shown is shown again: %q", r.stderr)
	}
	r = play(t, "exit3", 2, func(j *Job) { j.Show = ShowNone })
	if strings.Count(r.stderr, "[rank 1] so long") != 1 || !strings.HasSuffix(r.stderr, r.First.Report()) {
		t.Errorf("errors are shown in any case: %q", r.stderr)
	}
}

// TestStuckConsole checks that a blocked console loses no line of the log, and that the relay ends.
func TestStuckConsole(t *testing.T) {
	read, write := io.Pipe() // not read until the end
	con := newConsole(write)
	dir := t.TempDir()
	log, err := openLog(logsIn(t, dir), 0)
	if err != nil {
		t.Fatal(err)
	}
	src, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{
		src:     src,
		log:     log,
		con:     con,
		prefix:  "rank 0",
		show:    true,
		abandon: make(chan struct{}),
		done:    make(chan struct{}),
	}
	go r.run()
	go func() {
		for i := range 1000 {
			fmt.Fprintf(in, "line %d\n", i)
		}
		in.Close()
	}()
	close(r.abandon)
	<-r.done
	text, err := os.ReadFile(filepath.Join(dir, logName(0)))
	if err != nil || bytes.Count(text, []byte("\n")) != 1000 {
		t.Errorf("log of %d lines, %v", bytes.Count(text, []byte("\n")), err)
	}
	go io.Copy(io.Discard, read)
	con.close()
	write.Close()
}

// TestLogThatHangs checks that the wait for a dead worker's output ends if the disk of its log hangs, under its output
// and under its stacks. A pipe without a reader serves as such a file.
func TestLogThatHangs(t *testing.T) {
	read, log, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	src, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	con := newConsole(io.Discard)
	c := &child{
		conn: conn, received: make(chan struct{}),
		relay: &relay{src: src, log: log, con: con, abandon: make(chan struct{}), done: make(chan struct{})},
	}
	theirs.Close()
	go c.relay.run()
	io.WriteString(in, strings.Repeat("x", 160<<10)) // a pipe holds 64 KiB: then the relay hangs
	in.Close()
	go func() {
		c.keepStacks(json.RawMessage(`"stacks"`))
		close(c.received)
	}()
	c.flush(10 * time.Millisecond)
	for what, ended := range map[string]chan struct{}{"output": c.relay.done, "stacks": c.received} {
		select {
		case <-ended:
			t.Errorf("the log of the %s does not hang", what)
		default:
		}
	}
	read.Close()
	<-c.relay.done
	<-c.received
	con.close()
}

func TestLogRefusesLinks(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	if err := os.Symlink(target, filepath.Join(dir, "rank-0000.log")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "rank-0001.log"), 0o700); err != nil {
		t.Fatal(err)
	}
	for rank := range 2 {
		if f, err := openLog(logsIn(t, dir), rank); err == nil {
			t.Errorf("rank %d: opened %s", rank, f.Name())
		}
	}
	r := play(t, "done", 2, func(j *Job) { j.Logs = logsIn(t, dir) })
	if r.ExitCode != ExitFailed || r.Err == nil || r.First != nil || !strings.HasPrefix(r.Err.Error(), "log of rank 0") || r.stderr != "" {
		t.Errorf("%+v %q", r.Result, r.stderr)
	}
}

func TestLogIsAppended(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		if r := play(t, "output", 1, func(j *Job) { j.Logs = logsIn(t, dir) }); r.ExitCode != ExitDone {
			t.Fatalf("%+v", r.Result)
		}
	}
	log, err := os.ReadFile(filepath.Join(dir, "rank-0000.log"))
	if err != nil || bytes.Count(log, []byte("hello")) != 2 || bytes.Count(log, []byte("\n--- run ")) != 1 {
		t.Errorf("log of %d bytes, %v", len(log), err)
	}
}
