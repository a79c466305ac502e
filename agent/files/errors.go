package files

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
)

// problem returns an error that both APIs answer with this code and this sentence.
func problem(code connect.Code, format string, a ...any) error {
	return connect.NewError(code, fmt.Errorf(format, a...))
}

// codes says what the errors of the kernel mean for a caller.
var codes = []struct {
	errs []error
	code connect.Code
}{
	{[]error{unix.ENOENT, unix.ENOTDIR}, connect.CodeNotFound},
	{[]error{unix.EEXIST}, connect.CodeAlreadyExists},
	{[]error{unix.EACCES, unix.EPERM}, connect.CodePermissionDenied},
	{[]error{unix.ENAMETOOLONG, unix.EINVAL, unix.ELOOP}, connect.CodeInvalidArgument},
	{
		[]error{unix.EISDIR, unix.ENOTEMPTY, unix.EXDEV, unix.EROFS, unix.EBUSY, unix.ETXTBSY, unix.ENXIO, unix.EOPNOTSUPP},
		connect.CodeFailedPrecondition,
	},
	{[]error{unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE}, connect.CodeResourceExhausted},
	{[]error{context.Canceled}, connect.CodeCanceled},
	{[]error{context.DeadlineExceeded}, connect.CodeDeadlineExceeded},
}

// coded gives an error the code that a caller sees. An error that has one keeps it.
func coded(err error) error {
	var known *connect.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	if unknown := (*accounts.UnknownError)(nil); errors.As(err, &unknown) {
		return connect.NewError(connect.CodeUnauthenticated, err)
	}
	for _, c := range codes {
		for _, e := range c.errs {
			if errors.Is(err, e) {
				return connect.NewError(c.code, words(err))
			}
		}
	}
	return connect.NewError(connect.CodeInternal, words(err))
}

// words leaves out the name of the system call, which says nothing to a caller.
func words(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) && p.Op == "mkdir" {
		return fmt.Errorf("directory %s cannot be made: %w", p.Path, p.Err)
	}
	if p != nil {
		return fmt.Errorf("%s: %w", p.Path, p.Err)
	}
	return err
}

// statuses are the HTTP statuses of /files. E2B's SDKs have errors of their own for 400, 401, 404 and
// 507.
var statuses = map[connect.Code]int{
	connect.CodeInvalidArgument:    http.StatusBadRequest,
	connect.CodeUnauthenticated:    http.StatusUnauthorized,
	connect.CodePermissionDenied:   http.StatusForbidden,
	connect.CodeNotFound:           http.StatusNotFound,
	connect.CodeAlreadyExists:      http.StatusConflict,
	connect.CodeFailedPrecondition: http.StatusConflict,
	connect.CodeResourceExhausted:  http.StatusInsufficientStorage,
	connect.CodeOutOfRange:         http.StatusRequestEntityTooLarge,
	connect.CodeUnimplemented:      http.StatusUnsupportedMediaType,
	connect.CodeDeadlineExceeded:   http.StatusRequestTimeout,
	connect.CodeCanceled:           http.StatusRequestTimeout,
}

// fail answers a request of /files with an error. E2B's SDKs read the field message.
func fail(w http.ResponseWriter, err error) {
	var e *connect.Error
	errors.As(coded(err), &e)
	status, ok := statuses[e.Code()]
	if !ok {
		status = http.StatusInternalServerError
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, e.Message()})
}
