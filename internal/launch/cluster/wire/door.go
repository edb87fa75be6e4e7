package wire

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/base/admission"
)

// unproven bounds the connections in their handshake. A thousand agents may come in a moment; those that wait for
// a place do so in the system's queue.
var unproven = admission.Limits{Most: 64, Stay: 250 * time.Millisecond}

// Door takes the connections of other agents.
type Door struct {
	ln     net.Listener
	door   *admission.Door
	cancel context.CancelFunc
	group  sync.WaitGroup
}

// Open lets agents in: up gets the links of those that are welcome, refused the others' errors. Both are
// called from several goroutines.
func Open(ln net.Listener, p *Party, up func(*Link), refused func(error)) *Door {
	ctx, cancel := context.WithCancel(context.Background())
	d := &Door{ln: ln, door: admission.New(unproven), cancel: cancel}
	greet := func(conn net.Conn) {
		l, err := Accept(ctx, conn, p)
		known := d.door.Leave(conn)
		switch {
		case err == nil:
			up(l)
		case known: // others have not pushed it out
			refused(err)
		}
	}
	d.group.Go(func() { d.door.Serve(ln, greet, refused) })
	return d
}

// Close closes the listener, and waits until nothing of the door runs.
func (d *Door) Close() error {
	d.cancel()
	d.door.Close()
	err := d.ln.Close()
	d.group.Wait()
	return err
}
