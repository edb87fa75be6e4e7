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

// Times of one who asks.
const (
	attemptTime = 10 * time.Second // of one connection
	firstPause  = 50 * time.Millisecond
	lastPause   = time.Second
)

// Ask gets the key of a job from the first agent, at that address. It tries until ctx is done, since
// agents start in any order.
func Ask(ctx context.Context, address, job string, auth Authenticator) (Key, error) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		k, err := askOnce(ctx, address, job, auth)
		if err == nil {
			return k, nil
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return Key{}, fmt.Errorf("key of the job from %s: %w; see whether the first agent runs there, and whether its node lets this one in, or %s",
				terminal.Name(address), err, Fix)
		}
	}
}

func askOnce(ctx context.Context, address, job string, auth Authenticator) (k Key, err error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return k, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	own, err := newPair()
	if err != nil {
		return k, err
	}
	first := message{public: own.PublicKey().Bytes()}
	if first.credential, err = auth.Vouch(ctx, asked(job, first.public)); err != nil {
		return k, err
	}
	if err := first.write(c); err != nil {
		return k, err
	}
	answer, err := readMessage(c, sealedSize)
	if errors.Is(err, io.EOF) {
		err = errors.New("it closed the connection: it is of another job or user, or has too many connections")
	}
	if err != nil {
		return k, err
	}
	return take(ctx, auth, os.Geteuid(), job, own, answer)
}
