# SPDX-License-Identifier: Apache-2.0
"""Whether a request's grammar compiles in time, found out before the engine has the request."""
