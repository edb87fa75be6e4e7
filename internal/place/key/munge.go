package key

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/terminal"
)

// mungeTime bounds a call of munge or unmunge, each of which asks a daemon of the node.
const mungeTime = 5 * time.Second

// maxOutput bounds what is kept of their output.
const maxOutput = 16 << 10

// Munge vouches by the programs of munge, which a cluster of Slurm has on its nodes.
type Munge struct {
	munge, unmunge string // paths of the programs
}

// FindMunge returns the munge of this node.
func FindMunge() (*Munge, error) {
	m := &Munge{}
	var err error
	if m.munge, err = exec.LookPath("munge"); err == nil {
		m.unmunge, err = exec.LookPath("unmunge")
	}
	if err != nil {
		return nil, fmt.Errorf("munge is not on this node, which would vouch for those who ask: %w", err)
	}
	return m, nil
}

// Vouch has munge make a credential that only this user can read.
func (m *Munge) Vouch(ctx context.Context, payload []byte) ([]byte, error) {
	out, err := call(ctx, payload, m.munge, "--restrict-uid="+strconv.Itoa(os.Geteuid()))
	if err != nil {
		return nil, err
	}
	return bytes.TrimSpace(out), nil
}

// Open has unmunge check a credential.
func (m *Munge) Open(ctx context.Context, credential []byte) (payload []byte, uid int, err error) {
	out, err := call(ctx, credential, m.unmunge)
	if err != nil {
		return nil, 0, err
	}
	return parseUnmunge(out)
}

var (
	mungeSuccess = regexp.MustCompile(`^STATUS:\s+Success \(0\)$`)
	mungeUser    = regexp.MustCompile(`^UID:\s+(?:.* \()?([0-9]{1,10})\)?$`)
)

// parseUnmunge reads what unmunge prints: lines of what it knows, an empty one, the payload.
func parseUnmunge(out []byte) (payload []byte, uid int, err error) {
	head, payload, found := bytes.Cut(out, []byte("\n\n"))
	success, user := false, ""
	for line := range strings.Lines(string(head)) {
		line = strings.TrimRight(line, "\n")
		success = success || mungeSuccess.MatchString(line)
		if m := mungeUser.FindStringSubmatch(line); m != nil {
			if user != "" {
				return nil, 0, errors.New("unmunge names two users")
			}
			user = m[1]
		}
	}
	uid, err = strconv.Atoi(user)
	if !found || !success || err != nil {
		return nil, 0, fmt.Errorf("unmunge says %s", terminal.Name(terminal.Clip(string(out), 200)))
	}
	return payload, uid, nil
}

// call runs a program with that input, and returns what it prints.
func call(ctx context.Context, in []byte, program string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, mungeTime)
	defer cancel()
	c := exec.CommandContext(ctx, program, args...)
	c.WaitDelay = time.Second
	c.Stdin = bytes.NewReader(in)
	var out, errs limited
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil {
		text := strings.TrimSpace(errs.kept.String())
		return nil, fmt.Errorf("%s: %w: %s", terminal.Name(program), err, terminal.Name(terminal.Clip(text, 300)))
	}
	return out.kept.Bytes(), nil
}

// limited keeps the beginning of what is written. It has a buffer and is none, whose ReadFrom has no bound.
type limited struct{ kept bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	l.kept.Write(p[:min(len(p), maxOutput-l.kept.Len())])
	return len(p), nil
}
