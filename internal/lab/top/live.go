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
	// A live run is read every lookEvery, other runs every lookSeldom.
	lookEvery  = time.Second
	lookSeldom = 3 * time.Second
	// Without a terminal, lines have plainWidth columns.
	plainWidth = 100
	// Page up and page down scroll by page ranks.
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

// NewScreen returns the screen of this process's terminal. It sends no queries, whose answers could end up in the
// shell's input.
func NewScreen() (tcell.Screen, error) {
	return tcell.NewTerminfoScreenFromTty(nil, tcell.OptNegotiation(false),
		tcell.OptKeyboardProtocol(tcell.LegacyKeyboard))
}

// Live draws a run on a screen until q, Ctrl-C, a signal or the end of ctx. It always restores the terminal. Quitting
// is not an error.
func Live(ctx context.Context, s *Source, screen tcell.Screen, signals <-chan os.Signal) error {
	if err := screen.Init(); err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	defer screen.Fini() // also in a panic
	ctx, cancel := context.WithCancel(ctx)
	views, faults := make(chan *View, 1), make(chan error, 1)
	go watch(ctx, s, views, faults) // ends with ctx; on a hung file system, with the process
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
			if len(screen.EventQ()) > 0 { // resizing a window sends many
				continue
			}
		}
		d.draw()
	}
}

// watch reads the run repeatedly, in its own goroutine, so that the user can quit while a file system hangs. It reports
// panics as errors, so that Live restores the terminal.
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
	if _, ok := ev.(*tcell.EventResize); ok {
		d.screen.Sync()
	}
	key, ok := ev.(*tcell.EventKey)
	if !ok {
		return false
	}
	k, letter := key.Key(), ""
	if k == tcell.KeyRune {
		letter = key.Str()
	}
	switch {
	case k == tcell.KeyCtrlC, letter == "q", letter == "Q":
		return true
	case k == tcell.KeyCtrlZ:
		d.suspend()
	case k == tcell.KeyCtrlL:
		d.screen.Sync()
	case k == tcell.KeyUp, letter == "k":
		d.scroll(-1)
	case k == tcell.KeyDown, letter == "j":
		d.scroll(1)
	case k == tcell.KeyPgUp:
		d.scroll(-page)
	case k == tcell.KeyPgDn:
		d.scroll(page)
	case k == tcell.KeyHome:
		d.look.Scroll = 0
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

// suspend returns the terminal to the shell, and resumes with the process.
func (d *display) suspend() {
	if d.screen.Suspend() != nil {
		return
	}
	_ = syscall.Kill(0, syscall.SIGTSTP) // the whole process group, as Ctrl-Z does
	time.Sleep(100 * time.Millisecond)   // the process stops during this time
	_ = d.screen.Resume()                // drawing fails if this fails
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
	mono := d.screen.Colors() == 0 // tcell would draw colours as reversed
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
