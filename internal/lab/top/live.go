package top

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/gdamore/tcell/v3"
	"github.com/gdamore/tcell/v3/color"
)

const (
	// lookEvery separates two looks at a run that lives, and lookSeldom at another.
	lookEvery  = time.Second
	lookSeldom = 3 * time.Second
	// plainWidth bounds a picture without a terminal.
	plainWidth = 100
	// page counts the ranks of page up and page down.
	page = 10
)

// Print writes the present state as lines.
func Print(w io.Writer, s *Source) error {
	for _, line := range Layout(s.Look(time.Now()), plainWidth, 0, Look{}) {
		if _, err := fmt.Fprintln(w, line.String()); err != nil {
			return err
		}
	}
	return nil
}

// NewScreen returns the screen of this process's terminal. It asks the terminal nothing: answers could be left in
// the input of a shell.
func NewScreen() (tcell.Screen, error) {
	return tcell.NewTerminfoScreenFromTty(nil, tcell.OptNegotiation(false),
		tcell.OptKeyboardProtocol(tcell.LegacyKeyboard))
}

// Live draws a run on a screen until q or Ctrl-C is pressed, a signal comes or ctx ends. However it ends, the terminal
// is
// as it was. Quitting is no error.
func Live(ctx context.Context, s *Source, screen tcell.Screen, signals <-chan os.Signal) error {
	if err := screen.Init(); err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	defer screen.Fini() // also in a panic
	ctx, cancel := context.WithCancel(ctx)
	views, faults := make(chan *View, 1), make(chan error, 1)
	go watch(ctx, s, views, faults) // ends with ctx, or with the process if the file system hangs
	defer cancel()
	d := display{screen: screen, look: Look{Keys: true, Plain: screen.CharacterSet() != "UTF-8"}}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-signals:
			return nil
		case err := <-faults:
			return err
		case v := <-views:
			d.view = v
		case ev := <-screen.EventQ():
			if d.on(ev) {
				return nil
			}
			for more := true; more; { // a window that is dragged sends many
				select {
				case ev = <-screen.EventQ():
					if d.on(ev) {
						return nil
					}
				default:
					more = false
				}
			}
		}
		d.draw()
	}
}

// watch reads again and again. It has a goroutine of its own, so that a file system that hangs does not keep the user
// from
// quitting. What panics here must not leave the terminal as it is.
func watch(ctx context.Context, s *Source, views chan<- *View, faults chan<- error) {
	defer func() {
		if r := recover(); r != nil {
			faults <- fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	for {
		v := s.Look(time.Now())
		select {
		case views <- v:
		case <-ctx.Done():
			return
		}
		wait := lookEvery
		if !v.State.lives() {
			wait = lookSeldom
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
	}
}

type display struct {
	screen tcell.Screen
	view   *View // nil before the first look
	look   Look
}

func (d *display) on(ev tcell.Event) (quit bool) {
	switch ev := ev.(type) {
	case *tcell.EventResize:
		d.screen.Sync()
	case *tcell.EventKey:
		return d.key(ev)
	}
	return false
}

func (d *display) key(ev *tcell.EventKey) (quit bool) {
	switch ev.Key() {
	case tcell.KeyCtrlC:
		return true
	case tcell.KeyCtrlZ:
		d.suspend()
	case tcell.KeyCtrlL:
		d.screen.Sync()
	case tcell.KeyUp:
		d.scroll(-1)
	case tcell.KeyDown:
		d.scroll(1)
	case tcell.KeyPgUp:
		d.scroll(-page)
	case tcell.KeyPgDn:
		d.scroll(page)
	case tcell.KeyHome:
		d.look.Scroll = 0
	case tcell.KeyRune:
		switch ev.Str() {
		case "q", "Q":
			return true
		case "k":
			d.scroll(-1)
		case "j":
			d.scroll(1)
		}
	}
	return false
}

func (d *display) scroll(by int) {
	most := 0
	if d.view != nil {
		most = len(d.view.Rows) - 1
	}
	d.look.Scroll = max(0, min(d.look.Scroll+by, most))
}

// suspend gives the terminal back to the shell, and goes on when the shell says so.
func (d *display) suspend() {
	if d.screen.Suspend() != nil {
		return
	}
	_ = syscall.Kill(0, syscall.SIGTSTP) // the whole job, as Ctrl-Z does
	time.Sleep(100 * time.Millisecond)   // it is stopped somewhere in here
	_ = d.screen.Resume()                // if that fails, so does the next thing that is drawn
}

var styles = map[Style]tcell.Style{
	Plain:  tcell.StyleDefault,
	Dim:    tcell.StyleDefault.Dim(true),
	Bold:   tcell.StyleDefault.Bold(true),
	Good:   tcell.StyleDefault.Bold(true).Foreground(color.Green),
	Warn:   tcell.StyleDefault.Bold(true).Foreground(color.Olive),
	Bad:    tcell.StyleDefault.Bold(true).Foreground(color.Maroon),
	Accent: tcell.StyleDefault.Foreground(color.Teal),
}

func (d *display) draw() {
	w, h := d.screen.Size()
	d.screen.Clear()
	mono := d.screen.Colors() == 0 // a colour would be drawn as reversed
	if d.view != nil {
		for y, line := range Layout(d.view, w, h, d.look) {
			x := 0
			for _, s := range line {
				style := styles[s.Style]
				if mono {
					style = style.Foreground(color.Default)
				}
				d.screen.PutStrStyled(x, y, s.Text, style)
				x += width(s.Text)
			}
		}
	}
	d.screen.Show()
}
