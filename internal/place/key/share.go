package key

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/place"
)

// Source is where a job's key comes from.
type Source struct {
	// File is what CPRUN_KEY_FILE names; "": no file.
	File string
	// Stdin is read where File is -.
	Stdin io.Reader
	// Munge vouches between the agents of a job of Slurm; nil: the munge of this node.
	Munge Authenticator
	// Patience is how long an agent waits for the first one; 0: five minutes, since nodes may start as far apart.
	Patience time.Duration
	// Refused is called with why somebody did not get the key; may be nil.
	Refused func(error)
}

// Share gets the key of a job of several agents: from the file; or, on one host, from the first agent through
// the kernel; or, under Slurm, from the first agent by munge. The first agent then hands it on, also to those
// that come later: close what is returned with the job.
func (s Source) Share(ctx context.Context, p place.Place) (Key, io.Closer, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(s.Patience, 5*time.Minute))
	defer cancel()
	switch {
	case s.File != "":
		k, err := File(s.File, s.Stdin)
		return k, nobody{}, err
	case p.LocalAgents == p.MaxAgents && p.Rank == 0:
		return serveLocal(p.Job, s.Refused)
	case p.LocalAgents == p.MaxAgents:
		k, err := askLocal(ctx, p.Job)
		return k, nobody{}, err
	case p.Source != place.Slurm:
		return Key{}, nil, errors.New("the nodes of the job need a key, so that nobody else on the network joins it: " + Fix)
	}
	return s.byMunge(ctx, p)
}

// nobody is asked for a key that every agent has by itself.
type nobody struct{}

func (nobody) Close() error { return nil }

// byMunge gets the key of a step of Slurm on several nodes.
func (s Source) byMunge(ctx context.Context, p place.Place) (Key, io.Closer, error) {
	auth := s.Munge
	if auth == nil {
		m, err := FindMunge()
		if err != nil {
			return Key{}, nil, fmt.Errorf("key of the job: %w; %s", err, Fix)
		}
		auth = m
	}
	address, err := place.KeyAddress(p.Rendezvous)
	if err != nil {
		return Key{}, nil, err
	}
	if p.Rank != 0 {
		k, err := Ask(ctx, address, p.Job, auth)
		return k, nobody{}, err
	}
	return s.serve(address, p.Job, auth)
}

// serve makes the key, and hands it out.
func (s Source) serve(address, job string, auth Authenticator) (Key, io.Closer, error) {
	l, err := net.Listen("tcp", local(address))
	if err != nil {
		return Key{}, nil, fmt.Errorf("key of the job, at %s: %w; pass --rendezvous HOST:PORT with two ports that are free on this node, or start with srun --resv-ports=4", address, err)
	}
	k := New()
	return k, Serve(l, k, job, auth, s.Refused), nil
}

// local is where to listen so that an address leads there. The name of a host may mean several addresses of
// it, or on the host itself one that others do not reach. A loopback address stays what it is.
func local(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.IsLoopback() || strings.EqualFold(host, "localhost") {
		return address
	}
	return net.JoinHostPort("", port)
}
