package hostile

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// strangers returns hostile connections to the metrics port of a concurrent run.
func strangers() (all []input) {
	for name, say := range map[string]string{
		"that say nothing":     "",
		"that say half":        "GET /metrics HTTP/1.1\r\nHost: x\r\nX: ",
		"that read nothing":    strings.Repeat("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 1000),
		"with endless headers": "GET /metrics HTTP/1.1\r\n" + strings.Repeat("X: "+strings.Repeat("x", 1000)+"\r\n", 1000),
		"with endless bodies": "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" +
			strings.Repeat("x", 1<<16),
		"that speak in escapes": escape + "\r\n\r\n",
	} {
		address := new(string)
		all = append(all, input{kind: "metrics port", name: name, good: true, make: func(p *sandbox) []string {
			l, err := net.Listen("tcp", "127.0.0.1:0") // a free port, for a moment
			p.must(err)
			*address = l.Addr().String()
			p.must(l.Close())
			return []string{"--run-dir", "run", "--set", "log.prometheus=" + *address, "--set", "train.steps=150",
				"--set", "data.seq_len=512", "--set", "checkpoint.every=0", p.small()}
		}, beside: func(t *testing.T, pid int, p *sandbox) { hold(t, pid, *address, say) }})
	}
	sortInputs(all)
	return all
}

// hold opens many connections to a port of a run and keeps them until the run has ended. No process of the run may have
// descriptors for more than some of them.
func hold(t *testing.T, pid int, address, say string) {
	var held []net.Conn
	defer func() {
		for _, c := range held {
			c.Close()
		}
	}()
	for end := time.Now().Add(hangs / 2); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if c, err := net.Dial("tcp", address); err == nil {
			held = append(held, c)
			break
		}
	}
	if len(held) == 0 {
		t.Error("nobody listens on the metrics port")
		return
	}
	for range 400 {
		c, err := net.DialTimeout("tcp", address, time.Second)
		if err != nil {
			break // the run has ended, or the kernel's queue is full
		}
		held = append(held, c)
		c.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
		_, _ = io.WriteString(c, say) // unread data stays in the buffer
	}
	most := 0
	for _, p := range family(pid) {
		if fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p)); err == nil {
			most = max(most, len(fds))
		}
	}
	if most > 100 {
		t.Errorf("a process of the run holds %d descriptors among %d strangers", most, len(held))
	}
	t.Logf("%d strangers, at most %d descriptors", len(held), most)
	waitGone(pid)
}

// family returns a process and its descendants.
func family(pid int) []int {
	pids := []int{pid}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		var child, parent int
		_, rest, _ := bytes.Cut(text, []byte(") "))
		fmt.Sscanf(filepath.Base(filepath.Dir(path)), "%d", &child)
		var state string
		if _, err := fmt.Sscanf(string(rest), "%s %d", &state, &parent); err == nil && parent == pid {
			pids = append(pids, child)
		}
	}
	return pids
}

// waitGone waits until a process has ended, and fails the test if it hangs.
func waitGone(pid int) {
	for end := time.Now().Add(hangs); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || bytes.Contains(text, []byte(") Z ")) {
			return
		}
	}
}
