// Command cprun launches and runs context-parallel transformer training.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/cprun/cprun/internal/base/terminal"
	_ "github.com/cprun/cprun/internal/base/ulimit" // ends a process without enough files
	"github.com/cprun/cprun/internal/lab/command"
	"github.com/cprun/cprun/internal/model/machine"
)

// exitUsage reports bad usage, config or input, found before any process is spawned.
const exitUsage = 2

// exitPipe is the shell's status of a program that SIGPIPE has ended.
const exitPipe = 128 + int(syscall.SIGPIPE)

// version comes from scripts/version by way of make; "" after a plain go build or go install.
var version = ""

var (
	output = sink{w: os.Stdout}
	stdout = terminal.NewWriter(&output) // strips the control characters of a terminal
)

// A sink keeps the first error of its writes, because most printers drop it.
type sink struct {
	w   io.Writer
	err error
}

func (s *sink) Write(p []byte) (int, error) {
	if s.err == nil {
		_, s.err = s.w.Write(p)
	}
	return len(p), nil
}

func main() {
	code := run(os.Args[1:])
	stdout.Flush()
	switch {
	case errors.Is(output.err, syscall.EPIPE): // as in "cprun | head -1", in a launcher, which survives SIGPIPE
		code = cmp.Or(code, exitPipe)
	case output.err != nil:
		fmt.Fprintf(os.Stderr, "cprun: standard output: %s\n", terminal.Message(output.err))
		code = cmp.Or(code, 1)
	}
	os.Exit(code)
}

// A status is an exit status that a command has already explained.
type status int

func (s status) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

func run(args []string) int {
	root := rootCommand()
	root.SetOut(stdout)
	root.SetArgs(args)
	c, err := root, command.UseEnvironment()
	if err == nil {
		c, err = root.ExecuteContextC(context.Background())
	}
	var s status
	var input *command.InputError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &s):
		return int(s)
	case errors.As(err, &input):
		fmt.Fprintf(os.Stderr, "cprun: %s\n", terminal.Message(err))
		return exitUsage
	case errors.As(err, new(*usageError)):
		line := strings.ReplaceAll(err.Error(), "\n", `\n`) // of an argument
		fmt.Fprintf(os.Stderr, "cprun: %s\nTry: %s -h\n", terminal.Message(errors.New(line)), c.CommandPath())
		return exitUsage
	}
	fmt.Fprintf(os.Stderr, "cprun: %s\n", terminal.Message(err))
	return 1
}

type usageError struct{ error }

func (e *usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// finish turns an exit status into an error of the command.
func finish(code int, err error) error {
	if err == nil && code != 0 {
		return status(code)
	}
	return err
}

func versionString() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && strings.HasPrefix(info.Main.Version, "v") {
		return info.Main.Version
	}
	return "dev"
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "print the version",
		Example: "  cprun version",
		Args:    noArgs,
		Run: func(c *cobra.Command, _ []string) {
			info, _ := debug.ReadBuildInfo()
			fmt.Fprintf(c.OutOrStdout(), "cprun %s (%s, %s)\n", versionString(), info.GoVersion,
				map[bool]string{true: "cuda", false: "cpu"}[machine.Built])
		},
	}
}

func noArgs(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes no argument, got %q", c.CommandPath(), args)
	}
	return nil
}
