package launch

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// A heard collects output, and signals its first byte.
type heard struct {
	text  bytes.Buffer
	first chan struct{}
}

func (h *heard) Write(b []byte) (int, error) {
	if h.text.Len() == 0 {
		close(h.first)
	}
	return h.text.Write(b)
}

// TestProgramThatDoesNotEnd checks that Wait returns for a program that hangs in the kernel after SIGKILL.
func TestProgramThatDoesNotEnd(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	p := &Program{cmd: cmd, ended: make(chan struct{})} // as if it never ended
	if status, late := p.Wait(time.Millisecond, time.Millisecond); status != -1 || !late {
		t.Errorf("status %d, late %v", status, late)
	}
}

// TestProgram starts programs through a shell in front of the path, like srun.
func TestProgram(t *testing.T) {
	const loop = "echo ready; while :; do sleep 0.01; done"
	for _, c := range []struct {
		name, script string
		limit, grace time.Duration
		status       int
		late         bool
		out          string
	}{
		{"ends by itself", "echo ready; echo err >&2; exit 3", time.Minute, time.Minute, 3, false, "ready\nerr\n"},
		{"no limit", "echo ready", 0, 0, 0, false, "ready\n"},
		{"asked", "trap 'echo asked; exit 75' TERM; " + loop, time.Millisecond, time.Minute, 75, true,
			"ready\nasked\n"},
		{"hurried", "trap '' TERM; trap 'echo hurried; exit 130' INT; " + loop, time.Millisecond, time.Second, 130,
			true, "ready\nhurried\n"},
		{"killed", "trap '' TERM INT; " + loop, time.Millisecond, 10 * time.Millisecond, -1, true, "ready\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			out := heard{first: make(chan struct{})}
			p, err := StartProgram([]string{"sh", "-c", c.script}, nil, &out)
			if err != nil {
				t.Fatal(err)
			}
			<-out.first
			status, late := p.Wait(c.limit, c.grace)
			<-p.ended // Wait may have returned early, with incomplete output
			if status != c.status || late != c.late || out.text.String() != c.out {
				t.Errorf("status %d, late %v, %q", status, late, out.text.String())
			}
			p.Terminate() // its pid may be reused
			if again, _ := p.Wait(0, 0); again != status {
				t.Errorf("asked again, the status is %d", again)
			}
		})
	}
	if _, err := StartProgram([]string{"/nowhere/srun"}, nil, os.Stderr); err == nil ||
		!strings.Contains(err.Error(), "/nowhere/srun") {
		t.Errorf("a program that is not there: %v", err)
	}
}
