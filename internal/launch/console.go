package launch

import (
	"fmt"
	"io"

	"github.com/cprun/cprun/internal/base/terminal"
)

// console writes to the launcher's stderr, in whole lines and on a goroutine of its own, so
// that no caller blocks in a write that may never end.
type console struct {
	w     io.Writer
	queue chan []byte
	quit  chan struct{}
	done  chan struct{}
}

func newConsole(w io.Writer) *console {
	c := &console{w, make(chan []byte, 32), make(chan struct{}), make(chan struct{})}
	go c.run() // ended by close, which waits for it
	return c
}

func (c *console) run() {
	defer close(c.done)
	for {
		select {
		case b := <-c.queue:
			c.w.Write(b) // a console that is gone changes nothing about the job
		case <-c.quit:
			for {
				select {
				case b := <-c.queue:
					c.w.Write(b)
				default:
					return
				}
			}
		}
	}
}

// write queues b, which the console keeps; it gives up when abandon is closed.
func (c *console) write(b []byte, abandon <-chan struct{}) {
	select {
	case c.queue <- b:
	case <-abandon:
	case <-c.quit:
	}
}

// printf queues text, without what a terminal obeys.
func (c *console) printf(format string, args ...any) {
	c.write([]byte(terminal.Text(fmt.Sprintf(format, args...))), nil)
}

// close writes what is queued.
func (c *console) close() {
	close(c.quit)
	<-c.done
}
